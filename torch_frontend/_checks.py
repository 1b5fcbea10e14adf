"""What the differentiable functions ask of their arguments, in the one form of every user error.

Values (ends, counts, maps) are read on a CPU and within `debug_checks()`, where there are any: a compiler's and a
FakeTensorMode's tensors have shapes alone.
"""

from enum import Enum
from typing import Any, get_args

import torch
from torch import Tensor

from ..core_kernels.formats import BLOCK
from ..core_kernels.launch import fail
from ..core_kernels.recipe import Compute
from ._call import FLOATS, check_ends, checks_values, require_tensor
from ._torch_private import check, is_fake
from .mx_tensor import MXTensor

INTEGERS = (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8)


def reads_values(x: Tensor) -> bool:
    """Whether the values of x are checked here."""
    # In this order: Dynamo does not trace what follows.
    return not torch.compiler.is_compiling() and checks_values(x.device) and not (x.is_meta or is_fake(x))


def check_floats(op: str, name: str, x: Tensor, dims: int = 2) -> None:
    """Raise unless x has so many dims and is bf16, fp32 or MX."""
    require_tensor(op, name, x)
    if x.dtype not in FLOATS:
        fail(TypeError, op, name, f"dtype {x.dtype}", "allowed: bfloat16 or float32")
    if x.dim() != dims:
        fail(ValueError, op, name, f"shape {tuple(x.shape)}", f"allowed: {dims} dims")


def check_plain(op: str, name: str, x: Tensor) -> None:
    """Raise TypeError if x is an MXTensor."""
    if isinstance(x, MXTensor):
        fail(TypeError, op, name, "an MXTensor", "allowed: bfloat16 or float32; call .dequantize() first")


def check_rows(op: str, name: str, x: Tensor) -> None:
    """Raise unless x is (M, K) bf16, fp32 or MX."""
    check_floats(op, name, x)


def check_out_dtype(op: str, dtype: object) -> None:
    """Raise unless results can have this dtype."""
    if not isinstance(dtype, torch.dtype) or dtype not in FLOATS:
        fail(TypeError, op, "out_dtype", repr(dtype), "allowed: torch.bfloat16 or torch.float32")


def recipe_compute(op: str, kernel_preference: Any, compute: Any) -> Any:
    """`compute`, or "exact" where torchao's kernel_preference is EMULATED; raises unless the two agree."""
    name = kernel_preference.name if isinstance(kernel_preference, Enum) else kernel_preference
    if not isinstance(name, str) or name.lower() not in ("auto", "emulated"):
        error = ValueError if isinstance(name, str) else TypeError
        allowed = (
            "allowed: 'auto' or 'emulated', or torchao's members of these names; call force_implementation for more"
        )
        fail(error, op, "kernel_preference", repr(name), allowed)
    if compute not in get_args(Compute):
        fail(ValueError, op, "compute", repr(compute), f"allowed: {', '.join(map(repr, get_args(Compute)))}")
    if name.lower() == "auto":
        return compute
    if compute == "fold":
        fail(
            ValueError, op, "kernel_preference", f"{name!r} with compute 'fold'", "allowed: 'auto'; or compute='exact'"
        )
    return "exact"


def check_flag(op: str, name: str, flag: object) -> None:
    """Raise TypeError unless the flag is a bool."""
    if not isinstance(flag, bool):
        fail(TypeError, op, name, repr(flag), "allowed: bool")


def check_int(op: str, name: str, value: Any, least: int) -> None:
    """Raise unless value is an int from `least` up to what an int32 index counts."""
    if isinstance(value, bool) or not isinstance(value, int | torch.SymInt):
        fail(TypeError, op, name, repr(value), "allowed: an int")
    if isinstance(value, int) and not least <= value < 2**31:
        fail(ValueError, op, name, value, f"allowed: {least} to {2**31 - 1}")


def check_shape(op: str, name: str, x: Tensor, shape: tuple[Any, ...]) -> None:
    """Raise ValueError unless x has this shape, where a letter stands for any size."""
    right = x.dim() == len(shape)
    for size, wanted in zip(x.shape, shape, strict=False):
        if isinstance(wanted, str):
            continue
        if torch.compiler.is_compiling():
            # What an all-to-all returned has a sum of symbols for its rows: to be checked when it runs, not guessed.
            check(size == wanted)
        else:
            right = right and size == wanted
    if not right:
        sizes = ", ".join(map(str, shape)) + "," * (len(shape) == 1)
        fail(ValueError, op, name, f"shape {tuple(x.shape)}", f"allowed: ({sizes})")


def check_devices(op: str, x: str, device: torch.device, /, **others: Tensor) -> None:
    """Raise unless the others are where x is."""
    for name, other in others.items():
        if other.device != device:
            allowed = f"allowed: {device}, where {x} is; move it with .to()"
            fail(ValueError, op, name, f"device {other.device}", allowed)


def check_offs(op: str, offs: Tensor, x: Tensor, groups: int, x_name: str, weights: str) -> Tensor:
    """offs (groups,) as int32; raises unless it is int32 or int64 and ends groups of x's rows."""
    require_tensor(op, "offs", offs)
    if offs.dtype not in (torch.int32, torch.int64):
        fail(TypeError, op, "offs", f"dtype {offs.dtype}", "allowed: int32 or int64")
    if offs.shape != (groups,):
        allowed = f"allowed: ({groups},), one end per group of {weights}"
        fail(ValueError, op, "offs", f"shape {tuple(offs.shape)}", allowed)
    check_devices(op, x_name, x.device, offs=offs)
    if reads_values(offs):  # a compiled program's op checks them again when it runs
        check_ends(op, "offs", offs, x.shape[0])
    return offs.to(torch.int32).contiguous()


def check_token_blocks(op: str, name: str, rows: int, offs: Tensor, remedy: str) -> None:
    """Raise unless blocks of 32 tokens stay inside their groups."""
    if rows % BLOCK:
        fail(ValueError, op, name, f"M = {rows}", f"allowed: multiples of {BLOCK}; {remedy}")
    if reads_values(offs):
        check_ends(op, "offs", offs, rows, BLOCK, remedy)


def check_counts(op: str, name: str, counts: Tensor, device: torch.device) -> None:
    """Raise unless counts are of an integer dtype and on the device of the rows."""
    require_tensor(op, name, counts)
    if counts.dtype not in INTEGERS:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in INTEGERS)
        fail(TypeError, op, name, f"dtype {counts.dtype}", f"allowed: {allowed}")
    if counts.device != device:
        fail(ValueError, op, name, f"device {counts.device}", f"allowed: {device}, where the rows are")


def require_total(op: str, name: str, counts: Tensor, rows: int) -> None:
    """Raise ValueError unless counts are at least 0 and add up to the rows. Reads the values."""
    values = counts.tolist()
    if any(n < 0 for n in values) or sum(values) != rows:
        got = f"{values}, in total {sum(values)}"
        fail(ValueError, op, name, got, f"allowed: counts of at least 0, a total of {rows}, the rows")


def require_rows(op: str, name: str, counts: Tensor, rows: int) -> None:
    """Raise ValueError unless counts are at least 0 and no more than the rows in total. Reads the values."""
    values = counts.tolist()
    if any(n < 0 for n in values) or sum(values) > rows:
        got = f"{values}, in total {sum(values)}"
        fail(ValueError, op, name, got, f"allowed: counts of at least 0, a total up to {rows}, the rows")


def check_probs(op: str, name: str, probs: Tensor, shape: tuple[Any, ...], device: torch.device) -> None:
    """Raise unless probs is float32, of this shape and where the rows are."""
    check_plain(op, name, probs)
    require_tensor(op, name, probs)
    if probs.dtype != torch.float32:
        fail(TypeError, op, name, f"dtype {probs.dtype}", "allowed: float32")
    check_shape(op, name, probs, shape)
    check_devices(op, "the rows", device, **{name: probs})


def index_map(op: str, name: str, index: Tensor, device: torch.device, limit: Any, shape: tuple[Any, ...]) -> Tensor:
    """index as int32; raises unless it is int32 or int64, on the device, of that shape (see `check_shape`) and, where
    values are read, -1 (none) or an index below `limit`."""
    require_tensor(op, name, index)
    if index.dtype not in (torch.int32, torch.int64):
        fail(TypeError, op, name, f"dtype {index.dtype}", "allowed: int32 or int64")
    if index.device != device:
        fail(ValueError, op, name, f"device {index.device}", f"allowed: {device}, where the rows are")
    check_shape(op, name, index, shape)
    if reads_values(index) and index.numel():
        low, high = (int(x) for x in index.aminmax())
        if low < -1 or high >= limit:
            fail(ValueError, op, name, f"{low} to {high}", f"allowed: -1 (none) or an index below {limit}")
    return index.to(torch.int32).contiguous()


def check_way_back(op: str, there_name: str, there: Tensor, back_name: str, back: Tensor) -> None:
    """Raise ValueError unless, where values are read, each of two maps is the other's way back: a gradient that goes
    back by another map is wrong."""
    if not reads_values(there):
        return
    for name, one, other_name, other in ((back_name, back, there_name, there), (there_name, there, back_name, back)):
        rows = (other >= 0).nonzero().squeeze(1)
        wrong = one[other[rows].long()] != rows
        if wrong.any():
            i = int(rows[wrong][0])
            at = int(other[i])
            fail(ValueError, op, name, f"{int(one[at])} at {at}", f"allowed: {i}, since {other_name} has {at} at {i}")
