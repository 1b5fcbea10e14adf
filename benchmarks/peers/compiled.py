"""The alternatives of a torch user to an op: its formula under `torch.compile`, or torchao's Triton casts."""

import importlib.util
from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor

from . import formulas_torch

Tensors = tuple[Tensor, ...]


def torch_peers(op: str, formula: str | None, inputs: Tensors, outputs: Tensors) -> dict[str, Callable[[], Tensors]]:
    """Name -> peer. A peer allocates and returns outputs of our shapes and dtypes, in our order."""
    peers: dict[str, Callable[[], Tensors]] = {}
    if formula:
        peers["torch_compile"] = _compiled(formula, inputs, outputs)
    if op in ("quantize_row", "quantize_col") and _has_torchao():
        peers["torchao"] = partial(_torchao, op, inputs[0])
    return peers


def _compiled(name: str, inputs: Tensors, outputs: Tensors) -> Callable[[], Tensors]:
    formula = getattr(formulas_torch, name)
    types = [(out.shape, out.dtype, out.device) for out in outputs]

    def allocating(*inputs: Tensor) -> Tensors:
        fresh = tuple(torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in types)
        formula(*inputs, *fresh)
        return fresh

    torch.compiler.reset()  # Dynamo recompiles a function eight times at most, then runs it uncompiled
    return partial(torch.compile(allocating, dynamic=False, fullgraph=inputs[0].is_cuda), *inputs)


@cache
def _has_torchao() -> bool:
    if importlib.util.find_spec("torchao") is None:
        print("torchao: not installed")
        return False
    if torch.cuda.get_device_capability() < (10, 0):
        print("torchao: its Triton casts to MXFP8 raise on GPUs below sm_100")
        return False
    return True


def _torchao(name: str, x: Tensor) -> Tensors:
    from torchao.prototype.mx_formats import kernels  # pyright: ignore[reportMissingImports]

    if name == "quantize_row":
        q, sf = kernels.triton_to_mxfp8_dim0(x, 32, "rceil")
    else:
        q, sf = kernels.triton_to_mxfp8_dim1(x, 32, "rceil")
        q = q.t()
    return q.view(torch.uint8), sf.view(torch.uint8).reshape(len(q), -1)
