"""A call of an op, prepared once per op, layouts and options: its checks, its outputs, and the function that runs it.

    tensors --> layouts --.-- seen before: PreparedCall from a dict
    op, options ----------'-- new: checks, implementation, launch --> PreparedCall, cached

"cpp"     C++ through DLPack; a grouped GEMM: torch.matmul (cpu_gemm.py)
"cuda"    a CudaLaunch, which reads the addresses of the tensors in C++
"triton"  compiled at the first call, later the compiled kernel itself; on a CPU the interpreter of Triton
An op without a Triton kernel is composed of other ops, which call.py runs.
"""

from collections.abc import Callable, Hashable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import cpp_bindings
from ...core_kernels.formats import packed_width
from ...core_kernels.launch import ArrayType, KernelOp, Launch, fail
from . import cpu_gemm
from .device import Implementation, choose
from .private import exchange, raw_stream

Runner = Callable[[tuple[Tensor, ...], tuple[Tensor, ...]], Any]
"""Runs an op on inputs and outputs."""
Layout = tuple[torch.Size, torch.dtype, torch.device, tuple[int, ...]]
"""shape, dtype, device, strides."""

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e8m0fnu)


class Outputs(NamedTuple):
    """The dense row-major tensors to allocate: one entry of each tuple per tensor."""

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

    def after(self, first: int) -> "Outputs":
        """Without the first ones."""
        return Outputs(self.shapes[first:], self.strides[first:], self.dtypes[first:])


class PreparedCall(NamedTuple):
    """Everything about a call but the tensors.

    arch: the architecture that the call is prepared for. index: of the GPU; None on a CPU.
    options: of the op. tokens: `Signature.tokens`, for the check of group ends.
    outputs: to allocate, with the scratch memory of the launch, `scratch` tensors at the end. runner: None where other
    ops are composed.
    """

    arch: str
    index: int | None
    options: dict[str, Any]
    tokens: tuple[int, int] | None
    outputs: Outputs
    runner: Runner | None
    scratch: int = 0


Key = tuple[KernelOp, Hashable | None, Implementation | None, tuple[Any, ...]]
"""An op, the layouts of its tensors, the forced implementation, the values of its first options."""


class PreparedCalls:
    """The prepared calls of the last 2048 to 4096 keys in use.

    Two generations: a call in use moves to the recent one. When that is full it becomes the former one, and the calls
    of the former one are dropped. Every step is one operation on a dict: threads need no lock.
    """

    MOST = 2048

    def __init__(self) -> None:
        self.recent: dict[tuple[Any, ...], PreparedCall] = {}
        self.former: dict[tuple[Any, ...], PreparedCall] = {}

    def get(self, key: tuple[Any, ...]) -> PreparedCall | None:
        """For a key that `recent` does not have."""
        call = self.former.get(key)
        if call is not None:
            self.put(key, call)
        return call

    def put(self, key: tuple[Any, ...], call: PreparedCall) -> None:
        if len(self.recent) >= self.MOST:
            self.former, self.recent = self.recent, {}
        self.recent[key] = call


known_calls = PreparedCalls()


def prepare(key: Key, tensors: tuple[Tensor, ...]) -> PreparedCall:
    """The call of a key that `known_calls.recent` does not have, on tensors of its layouts.

    Raises ValueError unless the tensors are row-major, on one device and, on a GPU, aligned to 16 bytes, and the errors
    of `choose` and `KernelOp.check`.
    """
    op, found, forced, values = key
    call = known_calls.get(key)
    if call is None:
        for name, tensor in zip(op.inputs, tensors, strict=True):  # a schema lets None pass
            if not isinstance(tensor, Tensor):
                fail(TypeError, op.name, name, f"a {type(tensor).__name__}", "allowed: a torch.Tensor")
        options = dict(zip(op.options, values, strict=False))
        call = prepare_uncached(op, [layout_of(t) for t in tensors], forced, **options)
        if call.index is not None:
            _check_aligned(op, tensors)
        if found is not None:
            known_calls.put(key, call)
    return call


def layout_of(tensor: Tensor) -> Layout:
    return tensor.shape, tensor.dtype, tensor.device, tensor.stride()


def prepare_uncached(
    op: KernelOp, tensors: Sequence[Layout], forced: Implementation | None, **options: Any
) -> PreparedCall:
    """`prepare` for layouts alone."""
    device = tensors[0][2]
    check_devices(op.name, op.inputs[0], device, **dict(zip(op.inputs, (d for _, _, d, _ in tensors), strict=True)))
    _check_dense(op, tensors)
    index = device.index if device.type == "cuda" else None
    implementation, arch = choose(op, device, forced)
    inputs = tuple(array_type(shape, dtype) for shape, dtype, _, _ in tensors)
    out, attrs, tokens = op.signature(*inputs, **options)
    check_float8(op.name, op.inputs, [dtype for _, dtype, _, _ in tensors])
    if implementation == "cpp":
        attributes = tuple(attrs.values())
        runner = _matmul(op, *attributes) if op.name in cpu_gemm.TABLE else _cpp(op, attributes)
        return PreparedCall(arch, index, options, tokens, Outputs.of(out), runner)
    launch = op.launch(*inputs, arch=arch, **options)
    if implementation == "cuda" and launch.cuda_unsupported:
        implementation, _ = choose(op, device, forced, launch.cuda_unsupported)
    if implementation == "cuda" and all(launch.grid):
        assert exchange is not None  # without it `choose` returns "triton"
        written = (*out, *launch.scratch)
        runner = cpp_bindings.CudaLaunch(exchange, device.index, op.name, inputs, written, launch.cuda_attrs)
        return PreparedCall(arch, index, options, tokens, Outputs.of(written), runner, len(launch.scratch))
    if not all(launch.grid):
        runner = _skip_launch
    elif op.compose:
        return PreparedCall(arch, index, options, tokens, Outputs.of(()), None)
    else:
        runner = _interpreter(op, launch) if index is None else _triton(op, launch, index)
    return PreparedCall(arch, index, options, tokens, Outputs.of(out), runner)


def check_devices(op: str, x: str, device: torch.device, /, **others: Tensor | torch.device) -> None:
    """Raise ValueError unless the other tensors are on the device of x."""
    for name, other in others.items():
        there = other.device if isinstance(other, Tensor) else other
        if there != device:
            allowed = f"allowed: {device}, where {x} is; move it with .to()"
            fail(ValueError, op, name, f"device {there}", allowed)


def check_float8(op: str, names: Sequence[str], dtypes: Sequence[torch.dtype]) -> None:
    """Raise TypeError unless inputs of E4M3 are elements, and inputs of E8M0 scales; every other dtype passes. Both are
    bytes to the kernels, which would read one as the other."""
    for name, dtype in zip(names, dtypes, strict=True):
        if dtype in FLOAT8 and dtype not in (meant := _float8_of(name)):
            allowed = " or ".join(map(str, (torch.uint8, *meant)))
            fail(TypeError, op, name, f"dtype {dtype}", f"allowed: {allowed}")


def _float8_of(name: str) -> tuple[torch.dtype, ...]:
    """What the bytes of an input of this name are; nothing for packed rows, which are of both, and for levels."""
    if name == "x":
        return FLOAT8  # rows of any bytes
    if name.endswith(("q", "qf")):
        return (torch.float8_e4m3fn,)
    return (torch.float8_e8m0fnu,) if name.endswith("sf") or name in ("target", "blocked") else ()


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
    return ArrayType(tuple(shape), "uint8" if dtype in FLOAT8 else dtype_name(dtype))


def plain(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors without gradient, E4M3 and E8M0 as uint8, for DLPack and Triton."""
    return [as_bytes(t.detach()) for t in tensors]


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """The name by which an op takes the dtype of its output."""
    return str(dtype).removeprefix("torch.")


def at_address(part: Tensor) -> Tensor:
    """The part itself, or a copy at an address that kernels take: a multiple of 16 bytes, as a storage's address is."""
    return part.clone() if part.storage_offset() * part.element_size() % 16 else part


def packed_buffer(q: Tensor, sf: Tensor) -> Tensor | None:
    """The packed rows `[q | sf]` of which q and sf are views; None if they are not."""
    k, width = q.shape[1], packed_width(q.shape[1])
    if (
        q.stride() == sf.stride() == (width, 1)
        and q.untyped_storage().data_ptr() == sf.untyped_storage().data_ptr()
        and sf.storage_offset() == q.storage_offset() + k
    ):
        return q.as_strided((q.shape[0], width), (width, 1))
    return None


def as_bytes(tensor: Tensor) -> Tensor:
    """View E4M3 or E8M0 tensors as the uint8 that crosses every boundary; others pass."""
    return tensor.view(torch.uint8) if tensor.dtype in FLOAT8 else tensor


def _skip_launch(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
    """For outputs without bytes."""


def _cpp(op: KernelOp, attrs: tuple[int, ...]) -> Runner:
    return lambda inputs, outputs: cpp_bindings.run(op.name, plain(inputs), outputs, attrs, torch.get_num_threads())


def _matmul(op: KernelOp, clear_rest: int = False) -> Runner:
    def runner(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        # Autocast of the caller would change the dtype of an exact product.
        with torch.autocast("cpu", enabled=False):
            cpu_gemm.TABLE[op.name](*plain(inputs), *outputs)
        if clear_rest:
            for out in outputs:
                out[inputs[-1][-1:].sum() :] = 0

    return runner


def _triton_options(launch: Launch) -> dict[str, Any]:
    # No fusion: an fma rounds once where the contract rounds twice. Kernels call fma where it is meant.
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages, "enable_fp_fusion": False}
    return {**launch.meta, **options}


def _interpreter(op: KernelOp, launch: Launch) -> Runner:
    kernel, scalars, options = op.triton_kernel(), launch.scalars.values(), _triton_options(launch)
    return lambda inputs, outputs: kernel[launch.grid](*plain(inputs), *scalars, *outputs, **options)


def _triton(op: KernelOp, launch: Launch, index: int) -> Runner:
    """Compile at the first call; later start the compiled kernel itself. Triton's own look-up by argument takes longer
    than the rest of the call, and everything that it reads is fixed here (pointers are aligned to 16 bytes)."""
    kernel, scalars, options = op.triton_kernel(), tuple(launch.scalars.values()), _triton_options(launch)
    grid = (*launch.grid, 1, 1)[:3]
    compiled, constexprs = None, []

    def runner(inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> None:
        nonlocal compiled, constexprs
        if compiled is None:
            args = [*plain(inputs), *scalars, *outputs]
            constexprs = [options[name] for name in kernel.arg_names[len(args) :]]
            compiled = kernel[grid](*args, **options)[grid]
        else:
            read, written = [t.data_ptr() for t in inputs], [t.data_ptr() for t in outputs]
            compiled(*read, *scalars, *written, *constexprs, stream=raw_stream(index))

    return runner
