"""One op, described once: its computation, and its launch on a GPU.

    arrays of a framework --> ArrayType --> KernelOp.check --> Signature   outputs, attributes
                                                 |
    architecture -----------------------> KernelOp.tile ---> Tiling        grid, constexprs, scratch memory

`check` is the only function that checks arguments and sizes outputs. torch calls, torch fake rules, JAX abstract
evaluation and C++ calls follow its Signature. A launch of Triton or CUDA C++ follows a Launch: Signature and Tiling in
one.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

import numpy as np

_NONE: Mapping[str, int] = MappingProxyType({})


class ArrayType(NamedTuple):
    """Shape and numpy-style dtype name (`"bfloat16"`, `"uint8"`) of a dense row-major array."""

    shape: tuple[int, ...]
    dtype: str


NO_ENDS = ArrayType((0,), "int32")
"""In place of the `group_ends` of an op that works on all rows without them."""


class Signature(NamedTuple):
    """The computation of an op from arrays and options; the same on every architecture.

    out: the outputs. A frontend allocates them; the kernel writes every byte, but for what an op with `group_ends` has
        past the last end, where its documentation says "unspecified".
    attrs: integers that every implementation takes, by name: C++ and CUDA C++ in this order, Triton as constexprs.
    tokens: for an op with `group_ends`, the number of tokens that ends reach up to, and the number that each end is a
        multiple of. None for other ops.
    """

    out: tuple[ArrayType, ...]
    attrs: Mapping[str, int] = _NONE
    tokens: tuple[int, int] | None = None


class Call(NamedTuple):
    """A checked call, as `KernelOp.tile` reads it."""

    op: str
    inputs: tuple[ArrayType, ...]
    out: tuple[ArrayType, ...]
    attrs: Mapping[str, int] = _NONE


class Tiling(NamedTuple):
    """How a GPU runs a call.

    grid: programs along each axis of the Triton kernel. Where a dim is 0 the outputs have no bytes, and nothing is
        launched.
    scalars: run-time integers of the Triton kernel. meta: its constexprs besides the attributes.
    scratch: memory that the CUDA C++ kernel needs besides its outputs.
    cuda_attrs: integers that the CUDA C++ kernel takes besides the attributes.
    cuda_unsupported: the reason why the CUDA C++ kernel does not take these sizes; "" where it does.
    """

    grid: tuple[int, ...] = (1,)
    scalars: Mapping[str, int] = _NONE
    meta: Mapping[str, Any] = _NONE
    num_warps: int = 4
    num_stages: int = 1
    scratch: tuple[ArrayType, ...] = ()
    cuda_attrs: tuple[int, ...] = ()
    cuda_unsupported: str = ""


class Launch(NamedTuple):
    """Signature and Tiling in the form that implementations take. meta and cuda_attrs include the attributes."""

    out: tuple[ArrayType, ...]
    scratch: tuple[ArrayType, ...]
    grid: tuple[int, ...]
    scalars: Mapping[str, int]
    meta: Mapping[str, Any]
    num_warps: int
    num_stages: int
    cuda_attrs: tuple[int, ...]
    cuda_unsupported: str


@dataclass(frozen=True, slots=True, eq=False)  # compared by identity: caches hash it fast
class KernelOp:
    """An operation.

    name: in the C++ tables, in `torch.ops.mxep` and in the frontends' `ops`.
    doc: shapes, dtypes, errors and source; both frontends show it. Examples call `ops` and, as `xp`, the functions that
        torch and jax.numpy share.
    inputs, outputs: names of the arrays.
    check: `check(*types, **options) -> Signature`. Raises ValueError (shape, value) or TypeError (dtype).
    tile: `tile(call, arch) -> Tiling`, for GPUs and Triton's interpreter.
    kernel: the Triton kernel as "module:function" of core_kernels, "" without one. Its parameters are inputs, scalars,
        outputs, constexprs. It is imported when it is first launched.
    optional_ends: whether `group_ends`, the last input, may be left out: then the op works on all rows. With it the
        results of rows past the last end are unspecified.
    compose: for an op without a Triton kernel: `compose(call, *arrays, **options)` runs other ops in its place, each
        through `call(op, *arrays, **options)` of a frontend.
    """

    name: str
    doc: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    check: Callable[..., Signature]
    tile: Callable[[Call, str], Tiling]
    kernel: str = ""
    compose: Callable[..., tuple[Any, ...]] | None = None
    optional_ends: bool = False

    def signature(self, *inputs: ArrayType, **options: Any) -> Signature:
        """`check`, cached; raises TypeError for another number of arrays too."""
        inputs = self.complete(inputs, NO_ENDS)
        if len(inputs) != len(self.inputs):
            raise TypeError(f"{self.name}: takes {len(self.inputs)} arrays {self.inputs}, got {len(inputs)}")
        # With the types: 3, 3.0 and True are equal keys, and `check` refuses two of them.
        return _signature(self, inputs, tuple((name, type(value), value) for name, value in sorted(options.items())))

    def launch(self, *inputs: ArrayType, arch: str, **options: Any) -> Launch:
        """Check a call and tile it for "interpreter", "sm_90" or another architecture of tiles.py."""
        inputs = self.complete(inputs, NO_ENDS)
        out, attrs, _ = self.signature(*inputs, **options)
        tiling = self.tile(Call(self.name, inputs, out, attrs), arch)
        return Launch(
            out,
            tiling.scratch,
            tiling.grid,
            tiling.scalars,
            {**attrs, **tiling.meta},
            tiling.num_warps,
            tiling.num_stages,
            (*attrs.values(), *tiling.cuda_attrs),
            tiling.cuda_unsupported,
        )

    def triton_kernel(self) -> Any:
        """The `@triton.jit` function."""
        module, _, function = self.kernel.partition(":")
        return getattr(import_module(f"{__package__}.{module}"), function)

    def complete(self, inputs: tuple[Any, ...], no_ends: Any) -> tuple[Any, ...]:
        """The inputs, with `no_ends` for optional `group_ends` that are left out."""
        return (*inputs, no_ends) if self.optional_ends and len(inputs) == len(self.inputs) - 1 else inputs

    @property
    def rest_unspecified(self) -> bool:
        """Whether results are unspecified past the last end in every call: of an op that folds spans of groups."""
        return any(name.endswith("span_sf") for name in self.outputs)

    def specified(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[Any]:
        """The outputs of a call, or their parts up to the last end if they are unspecified past it. Reads the end."""
        given = self.optional_ends and len(inputs) == len(self.inputs) and len(inputs[-1])
        if not (self.rest_unspecified or given):
            return list(outputs)
        end = max(int(inputs[-1][-1]), 0) if len(inputs[-1]) else 0

        def cut(name: str, x: Any) -> Any:
            if name.endswith("span_sf"):
                return x  # slots, whose last ones are zeros
            return x[..., :end] if name.endswith("_t") or self.name == "fold_groups" else x[:end]

        return [cut(name, x) for name, x in zip(self.outputs, outputs, strict=True)]

    @property
    def options(self) -> dict[str, inspect.Parameter]:
        """The keyword options of `check`."""
        parameters = inspect.signature(self.check).parameters
        return {name: p for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY}

    @property
    def parts(self) -> "tuple[KernelOp, ...]":
        """The ops that `compose` runs, and in place of a composed one those that it runs; none for an op with a Triton
        kernel."""
        ran: list[KernelOp] = []

        def record(op: KernelOp, *_arrays: Any, **_options: Any) -> tuple[None, ...]:
            ran.extend(op.parts or (op,))
            return (None,) * len(op.outputs)

        if self.compose is not None:
            self.compose(record, *self.inputs)
        return tuple(ran)


@lru_cache(maxsize=4096)
def _signature(op: KernelOp, inputs: tuple[ArrayType, ...], options: tuple[tuple[str, type, Any], ...]) -> Signature:
    return op.check(*inputs, **{name: value for name, _, value in options})


def fail(error: type[Exception], op: str, argument: str, got: object, allowed: str = "", *, hint: str = "") -> NoReturn:
    """Raise `error` in the one form of all user errors of mxep. allowed: "allowed: " and the values. hint: what to do,
    alone where no value is allowed."""
    raise error(f"{op}: {argument}: got {got}; {'; '.join(filter(None, (allowed, hint)))}")


def require_choice(op: str, argument: str, value: object, choices: Sequence[str | None]) -> None:
    """Raise ValueError unless the value is one of the choices."""
    if not isinstance(value, str | None) or value not in choices:
        fail(ValueError, op, argument, repr(value), f"allowed: {', '.join(map(repr, choices))}")


def require_dtype(op: str, argument: str, array: ArrayType, *allowed: str) -> None:
    """Raise TypeError unless the array has one of the allowed dtypes."""
    if array.dtype not in allowed:
        fail(TypeError, op, argument, f"dtype {array.dtype}", f"allowed: {' or '.join(allowed)}")


def require_rank(op: str, argument: str, array: ArrayType, *allowed: int) -> None:
    """Raise ValueError unless the array has one of the allowed numbers of dims."""
    if len(array.shape) not in allowed:
        fail(ValueError, op, argument, f"shape {array.shape}", f"allowed: {' or '.join(map(str, allowed))} dims")


def require_shape(op: str, argument: str, array: ArrayType, shape: tuple[int, ...], why: str) -> None:
    """Raise ValueError unless the array has exactly this shape; `why` is the origin of the shape."""
    if array.shape != shape:
        fail(ValueError, op, argument, f"shape {array.shape}", f"allowed: {shape}, {why}")


def require_size(op: str, argument: str, size: int, least: int = 0) -> None:
    """Raise ValueError unless a size is from `least` up to the largest int32; a symbolic size passes."""
    known = hasattr(size, "__index__") or hasattr(size, "dimension_as_value")  # the latter of jax.export
    if isinstance(size, bool) or not known:
        fail(TypeError, op, argument, repr(size), "allowed: an int")
    if isinstance(size, int | np.integer) and not least <= size < 2**31:
        fail(ValueError, op, argument, size, f"allowed: {least} to {2**31 - 1}")


def require_multiple(op: str, argument: str, size: int, multiple: int, what: str, remedy: str = "") -> None:
    """Raise ValueError unless `size` is a multiple; `what` names the dim, `remedy` is the advice to the user."""
    if size % multiple:
        tail = f"; {remedy}" if remedy else ""
        fail(ValueError, op, argument, f"{what} = {size}", f"allowed: multiples of {multiple}{tail}")


def require_ends(op: str, argument: str, ends: Sequence[int], rows: int, multiple: int, remedy: str) -> None:
    """Raise ValueError unless group ends are non-decreasing multiples of `multiple` in 0..rows; `remedy` is the advice
    for ends that are no multiples."""
    if any(a > b for a, b in zip([0, *ends], [*ends, rows], strict=True)):
        allowed = f"allowed: non-decreasing ends from 0 up to {rows}, the rows of the first operand"
        fail(ValueError, op, argument, ends, allowed)
    if any(end % multiple for end in ends):
        fail(ValueError, op, argument, ends, f"allowed: multiples of {multiple}; {remedy}")


ROWS_UP_TO = """group_ends: (G,) int32, where each group of rows ends. The results of rows past the last end are
            unspecified: nothing reads or writes these rows. None: all rows."""
"""Optional group ends, as an entry under `Args:` of the docs of ops."""


def check_optional_ends(op: str, ends: ArrayType, shape: tuple[int, ...]) -> tuple[int, int]:
    """`Signature.tokens` of an op with optional `group_ends` on rows of this shape; raises unless they are (G,) int32
    and there are no matrices of rows."""
    require_dtype(op, "group_ends", ends, "int32")
    require_rank(op, "group_ends", ends, 1)
    if ends != NO_ENDS and len(shape) != 2:
        fail(ValueError, op, "group_ends", f"ends for {len(shape)} dims", "allowed: none, or rows of 2 dims")
    return shape[-2], 1


def require_ends_of(op: KernelOp, ends: Sequence[int], tokens: tuple[int, int]) -> None:
    """`require_ends` for the values of an op's `group_ends`; tokens: of its Signature."""
    rows, multiple = tokens
    require_ends(op.name, "group_ends", ends, rows, multiple, "pad the groups, see `row_map`")
