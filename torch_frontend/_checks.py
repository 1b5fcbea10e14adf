"""What the grouped products ask of their arguments, in the one form of every user error."""

import torch
from torch import Tensor

from ..core_kernels.formats import BLOCK
from ..core_kernels.launch import fail
from ._call import FLOATS, check_ends, checks_values, require_tensor


def check_rows(op: str, name: str, x: Tensor) -> None:
    """Raise unless x is (M, K) bf16, fp32 or MX."""
    require_tensor(op, name, x)
    if x.dtype not in FLOATS:
        fail(TypeError, op, name, f"dtype {x.dtype}", "allowed: bfloat16 or float32 (or an MXTensor)")
    if x.dim() != 2:
        fail(ValueError, op, name, f"shape {tuple(x.shape)}", "allowed: 2 dims")


def check_offs(op: str, offs: Tensor, x: Tensor, groups: int, x_name: str, weights: str) -> None:
    """Raise unless offs (groups,) int32 ends groups of x's rows; the values are checked where that syncs nothing."""
    if not isinstance(offs, Tensor) or offs.dtype != torch.int32:
        fail(TypeError, op, "offs", getattr(offs, "dtype", type(offs).__name__), "allowed: an int32 tensor (G,)")
    if offs.shape != (groups,):
        allowed = f"allowed: ({groups},), one end per group of {weights}"
        fail(ValueError, op, "offs", f"shape {tuple(offs.shape)}", allowed)
    check_devices(op, x_name, x.device, offs=offs)
    # While compiling there are no values; the op checks them again when it runs.
    if not torch.compiler.is_compiling() and checks_values(offs.device):
        check_ends(op, "offs", offs, x.shape[0])


def check_devices(op: str, x: str, device: torch.device, **others: Tensor) -> None:
    """Raise unless the others are where x is."""
    for name, other in others.items():
        if other.device != device:
            allowed = f"allowed: {device}, where {x} is; move it with .to()"
            fail(ValueError, op, name, f"device {other.device}", allowed)


def check_token_blocks(op: str, name: str, rows: int, offs: Tensor, remedy: str) -> None:
    """Raise unless blocks of 32 tokens stay inside their groups."""
    if rows % BLOCK:
        fail(ValueError, op, name, f"M = {rows}", f"allowed: multiples of {BLOCK}; {remedy}")
    if not torch.compiler.is_compiling() and checks_values(offs.device):
        check_ends(op, "offs", offs, rows, BLOCK, remedy)
