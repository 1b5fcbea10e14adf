"""What starts an op, decided once per op, layouts and options: the plan, and a function of the tensors alone.

    tensors --> layouts --.-- known: Bound
    op, options ----------'-- new: checks, implementation, plan --> Bound, kept

"cpp"     C++ through DLPack; a grouped GEMM: torch.matmul (_cpu_gemm.py)
"cuda"    a bound launch, which reads the tensors' addresses itself
"triton"  compiled at the first call, then the compiled kernel itself; on a CPU Triton's interpreter
"parts"   nothing here: _call.py composes other ops
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import cpp_bindings
from ..core_kernels.launch import ArrayType, KernelOp, Launch, fail
from . import _cpu_gemm
from ._device import Implementation, choose, without_cuda
from ._torch_private import exchange, layouts, raw_stream

Start = Callable[[tuple[Tensor, ...], tuple[Tensor, ...]], Any]
Layout = tuple[torch.Size, torch.dtype, torch.device, tuple[int, ...]]
"""shape, dtype, device, strides."""

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e8m0fnu)


class Outputs(NamedTuple):
    """What to allocate: dense row-major arrays, one after the other in each of these."""

    shapes: tuple[tuple[int, ...], ...]
    strides: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]

    @classmethod
    def of(cls, arrays: Sequence[ArrayType]) -> "Outputs":
        strides = (torch.empty(array.shape, device="meta").stride() for array in arrays)
        return cls(
            tuple(array.shape for array in arrays),
            tuple(strides),
            tuple(getattr(torch, array.dtype) for array in arrays),
        )


class Bound(NamedTuple):
    """arch: what was planned for, with these options. index: the GPU's; None on a CPU. start: runs the op on inputs and
    outputs; None where others are composed."""

    arch: str
    index: int | None
    options: dict[str, Any]
    outputs: Outputs
    start: Start | None


class Known:
    """What was decided, by its key, for the last 2048 to 4096 keys in use.

    Two generations: what is used moves to the recent one, and when that is full, it becomes the former one, whose rest
    is let go. Every step is one operation on a dict: threads need no lock.
    """

    MOST = 2048

    def __init__(self) -> None:
        self.recent: dict[tuple[Any, ...], Bound] = {}
        self.former: dict[tuple[Any, ...], Bound] = {}

    def get(self, key: tuple[Any, ...]) -> Bound | None:
        """For a key that `recent` does not have."""
        bound = self.former.get(key)
        if bound is not None:
            self.put(key, bound)
        return bound

    def put(self, key: tuple[Any, ...], bound: Bound) -> None:
        if len(self.recent) >= self.MOST:
            self.former, self.recent = self.recent, {}
        self.recent[key] = bound


_known = Known()


def bind(
    op: KernelOp, tensors: tuple[Tensor, ...], forced: Implementation | None, names: tuple[str, ...], values: tuple
) -> Bound:
    """What runs the op on tensors laid out like these, with `names[i]=values[i]` for as many values as there are.

    Raises ValueError unless the tensors are row-major, on one device and, on a GPU, aligned to 16 bytes, and what
    `choose` and `KernelOp.plan` raise.
    """
    found = layouts(tensors)
    key = (op, found, forced, names, values)
    bound = _known.recent.get(key)
    if bound is None:
        bound = _known.get(key)
    if bound is None:
        for name, tensor in zip(op.inputs, tensors, strict=True):  # a schema lets None pass
            if not isinstance(tensor, Tensor):
                fail(TypeError, op.name, name, f"a {type(tensor).__name__}", "allowed: a torch.Tensor")
        bound = decide(op, [layout_of(t) for t in tensors], forced, **dict(zip(names, values, strict=False)))
        if bound.index is not None:
            _check_aligned(op, tensors)
        if found is not None:
            _known.put(key, bound)
    return bound


def layout_of(tensor: Tensor) -> Layout:
    return tensor.shape, tensor.dtype, tensor.device, tensor.stride()


def decide(op: KernelOp, tensors: Sequence[Layout], forced: Implementation | None, **options: Any) -> Bound:
    """`bind` for layouts alone: everything about a call but the tensors."""
    check_devices(op, [device for _, _, device, _ in tensors])
    _check_dense(op, tensors)
    device = tensors[0][2]
    index = device.index if device.type == "cuda" else None
    implementation, arch = choose(op, device, forced)
    inputs = tuple(array_type(shape, dtype) for shape, dtype, _, _ in tensors)
    launch = op.plan(*inputs, arch=arch, **options)
    if implementation == "cuda" and launch.not_in_cuda:
        if forced == "cuda":
            fail(NotImplementedError, op.name, "device", f"{device} with 'cuda' forced", launch.not_in_cuda)
        implementation = without_cuda(op)
    if implementation == "parts":
        return Bound(arch, index, options, Outputs.of(()), None)
    if implementation == "cpp":
        start = _matmul(op) if op.name in _cpu_gemm.TABLE else _cpp(op, launch)
    elif not all(launch.grid):
        start = _nothing
    elif implementation == "cuda":
        start = _cuda(op, launch, inputs, device.index)
    else:
        start = _interpreter(op, launch) if index is None else _triton(op, launch, index)
    return Bound(arch, index, options, Outputs.of(launch.out), start)


def check_devices(op: KernelOp, devices: Sequence[torch.device]) -> None:
    """Raise ValueError unless all inputs are on the first one's device."""
    for i, device in enumerate(devices):
        if device != devices[0]:
            allowed = f"allowed: {devices[0]}, where {op.inputs[0]} is; move it with .to()"
            fail(ValueError, op.name, op.inputs[i], f"device {device}", allowed)


def _check_dense(op: KernelOp, layouts: Sequence[Layout]) -> None:
    for i, (shape, _, _, strides) in enumerate(layouts):
        if not torch.empty_strided(shape, strides, device="meta").is_contiguous():
            got = f"shape {tuple(shape)} with strides {strides}"
            fail(ValueError, op.name, op.inputs[i], got, "allowed: contiguous tensors; call .contiguous()")


def _check_aligned(op: KernelOp, inputs: Sequence[Tensor]) -> None:
    for i, tensor in enumerate(inputs):
        if tensor.data_ptr() % 16:
            got = f"data_ptr() {tensor.data_ptr():#x}, storage_offset {tensor.storage_offset()}"
            fail(ValueError, op.name, op.inputs[i], got, "allowed: multiples of 16 bytes on a GPU; call .clone()")


def array_type(shape: torch.Size, dtype: torch.dtype) -> ArrayType:
    """E4M3 and E8M0 are bytes to every kernel."""
    return ArrayType(tuple(shape), "uint8" if dtype in FLOAT8 else str(dtype).removeprefix("torch."))


def _nothing(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
    """No output has a byte."""


def plain(tensors: Sequence[Tensor]) -> list[Tensor]:
    """As those who look at more than addresses want them: E4M3 and E8M0 as uint8, none with a gradient."""
    return [as_bytes(t.detach()) for t in tensors]


def as_bytes(tensor: Tensor) -> Tensor:
    """View E4M3 or E8M0 tensors as the uint8 that crosses every boundary; others pass."""
    return tensor.view(torch.uint8) if tensor.dtype in FLOAT8 else tensor


def _cpp(op: KernelOp, launch: Launch) -> Start:
    attrs = [int(a) for a in launch.attrs]
    return lambda inputs, outputs: cpp_bindings.run(op.name, plain(inputs), outputs, attrs, torch.get_num_threads())


def _matmul(op: KernelOp) -> Start:
    def start(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        # An exact product does not become another one under the caller's autocast.
        with torch.autocast("cpu", enabled=False):
            _cpu_gemm.TABLE[op.name](*plain(inputs), *outputs)

    return start


def _cuda(op: KernelOp, launch: Launch, inputs: tuple[ArrayType, ...], index: int) -> Start:
    assert exchange is not None  # else `choose` does not come here
    return cpp_bindings.CudaLaunch(exchange, index, op.name, inputs, launch.out, [int(a) for a in launch.attrs])


def _triton_options(launch: Launch) -> dict[str, Any]:
    # No fusion: an fma rounds once where the contract rounds twice. The kernels write the ones they mean.
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages, "enable_fp_fusion": False}
    return {**launch.meta, **options}


def _interpreter(op: KernelOp, launch: Launch) -> Start:
    scalars, options = launch.scalars.values(), _triton_options(launch)
    return lambda inputs, outputs: op.kernel[launch.grid](*plain(inputs), *scalars, *outputs, **options)


def _triton(op: KernelOp, launch: Launch, index: int) -> Start:
    """Compiles at the first call. Later ones start the compiled kernel itself: Triton's own look-up by argument takes
    longer than the rest of the call, and all it would look at is fixed here (pointers are aligned to 16 bytes)."""
    scalars, options = tuple(launch.scalars.values()), _triton_options(launch)
    grid = (*launch.grid, 1, 1)[:3]
    compiled, constexprs = None, []

    def start(inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> None:
        nonlocal compiled, constexprs
        if compiled is None:
            args = (*plain(inputs), *scalars, *outputs)
            constexprs = [options[name] for name in op.kernel.arg_names[len(args) :]]
            compiled = op.kernel[grid](*args, **options)[grid]
        else:
            pointers = [t.data_ptr() for t in (*inputs, *outputs)]
            n = len(inputs)
            compiled(*pointers[:n], *scalars, *pointers[n:], *constexprs, stream=raw_stream(index))

    return start
