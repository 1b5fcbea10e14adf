"""One launch, described once.

    arrays of a framework --> ArrayType --.
                                          +--> KernelOp.plan --> Launch --> C++ table | Triton | fake rule
    options (rounding, alignment, ...) ---'

`plan` is the only place that checks arguments and sizes outputs. A torch call, a torch fake rule,
a JAX abstract evaluation, a C++ call and a Triton launch all ask it, so they cannot disagree.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn


class ArrayType(NamedTuple):
    """Shape and numpy-style dtype name (`"bfloat16"`, `"uint8"`) of a dense row-major array."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Launch:
    """Everything about one launch but the pointers.

    out: what the caller allocates; the kernel writes every byte of it.
    grid: programs along each axis. Where a dim is 0 the outputs have no bytes and the caller launches nothing.
    meta: the kernel's constexprs. Those that `KernelOp.attrs` names also say *what* is computed and
        go to every implementation; the rest are tiles, which only Triton reads.
    not_in_cuda: why these sizes run in Triton though the op has a CUDA C++ kernel; "" where that takes them.
    """

    out: tuple[ArrayType, ...]
    attrs: tuple[int, ...]
    grid: tuple[int, ...] = (1,)
    scalars: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    meta: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    num_warps: int = 4
    num_stages: int = 1
    not_in_cuda: str = ""


@dataclass(frozen=True, slots=True, eq=False)  # an op is itself: a key of caches that hashes fast
class KernelOp:
    """An operation: its name in the C++ table, its Triton kernel, and the plan that both follow.

    A Triton kernel takes, in this order: inputs, scalars, outputs, constexprs. A C++ op takes the
    inputs, the outputs and `attrs` as 64-bit integers.
    """

    name: str
    kernel: Any
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attrs: tuple[str, ...]
    make_plan: Callable[..., Launch]
    compose: Callable[..., tuple[Any, ...]] | None = None
    """For an op without a Triton kernel: `compose(call, *arrays, **options)` runs other ops in its place, each through
    `call(op, *arrays, **options)` of a frontend."""

    @property
    def parts(self) -> "tuple[KernelOp, ...]":
        """The ops that `compose` runs; none for an op with a Triton kernel."""
        ran: list[KernelOp] = []

        def record(op: KernelOp, *_arrays: Any, **_options: Any) -> tuple[None, ...]:
            ran.append(op)
            return (None,) * len(op.outputs)

        if self.compose is not None:
            self.compose(record, *self.inputs)
        return tuple(ran)

    def plan(self, *inputs: ArrayType, arch: str, **options: Any) -> Launch:
        """Check the inputs and options and size the launch for `arch` (see tiles.py); cached.

        Raises ValueError (shape or value) or TypeError (dtype), naming op, argument, what came and
        what is allowed.
        """
        if len(inputs) != len(self.inputs):
            raise TypeError(f"{self.name}: takes {len(self.inputs)} arrays {self.inputs}, got {len(inputs)}")
        return _plan(self, inputs, arch, tuple(sorted(options.items())))


@lru_cache(maxsize=4096)
def _plan(op: KernelOp, inputs: tuple[ArrayType, ...], arch: str, options: tuple[tuple[str, Any], ...]) -> Launch:
    return op.make_plan(*inputs, arch=arch, **dict(options))


def fail(error: type[Exception], op: str, argument: str, got: object, allowed: str) -> NoReturn:
    """Raise `error` in the one form that every user error of mxep has."""
    raise error(f"{op}: {argument}: got {got}; {allowed}")


def require_dtype(op: str, argument: str, array: ArrayType, *allowed: str) -> None:
    """Raise TypeError unless the array has one of the allowed dtypes."""
    if array.dtype not in allowed:
        fail(TypeError, op, argument, f"dtype {array.dtype}", f"allowed: {' or '.join(allowed)}")


def require_rank(op: str, argument: str, array: ArrayType, *allowed: int) -> None:
    """Raise ValueError unless the array has one of the allowed numbers of dims."""
    if len(array.shape) not in allowed:
        fail(ValueError, op, argument, f"shape {array.shape}", f"allowed: {' or '.join(map(str, allowed))} dims")


def require_shape(op: str, argument: str, array: ArrayType, shape: tuple[int, ...], why: str) -> None:
    """Raise ValueError unless the array has exactly this shape; `why` says where it comes from."""
    if array.shape != shape:
        fail(ValueError, op, argument, f"shape {array.shape}", f"allowed: {shape}, {why}")


def require_size(op: str, argument: str, size: int, least: int = 0) -> None:
    """Raise ValueError unless a size is from `least` up to what an int32 index counts; a symbol's is not looked at."""
    if not hasattr(size, "__index__"):
        fail(TypeError, op, argument, repr(size), "allowed: an int")
    if isinstance(size, int) and not least <= size < 2**31:
        fail(ValueError, op, argument, size, f"allowed: {least} to {2**31 - 1}")


def require_multiple(op: str, argument: str, size: int, multiple: int, what: str, remedy: str = "") -> None:
    """Raise ValueError unless `size` is a multiple; `what` names the dim, `remedy` says what to do."""
    if size % multiple:
        tail = f"; {remedy}" if remedy else ""
        fail(ValueError, op, argument, f"{what} = {size}", f"allowed: multiples of {multiple}{tail}")
