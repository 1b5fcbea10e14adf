"""Argument checks of the differentiable functions, each with the error grammar of `launch.fail`.

The values of group ends, counts and maps are checked on a CPU and within `debug_checks()`. Under torch.compile and in a
FakeTensorMode tensors have no values, so shapes and dtypes alone are checked there.
"""

import math
from typing import Any

import torch
from torch import Tensor

from ...core_kernels.formats import BLOCK
from ...core_kernels.launch import fail, require_ends
from .call import FLOATS, checks_values, require_tensor
from .launch import check_devices
from .mx_tensor import MXTensor
from .private import check, is_fake

INTEGERS = (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8)


def reads_values(x: Tensor) -> bool:
    """Whether the values of x are checked here."""
    # `is_compiling` comes first: Dynamo cannot trace the other two.
    return not torch.compiler.is_compiling() and checks_values(x.device) and not (x.is_meta or is_fake(x))


def check_floats(op: str, name: str, x: Tensor, dims: int = 2) -> None:
    """Raise unless x is bf16, fp32 or MX with `dims` dims."""
    require_tensor(op, name, x)
    if x.dtype not in FLOATS:
        fail(TypeError, op, name, f"dtype {x.dtype}", "allowed: bfloat16 or float32")
    if x.dim() != dims:
        fail(ValueError, op, name, f"shape {tuple(x.shape)}", f"allowed: {dims} dims")


def check_plain(op: str, name: str, x: Tensor) -> None:
    """Raise TypeError if x is an MXTensor."""
    if isinstance(x, MXTensor):
        fail(TypeError, op, name, "an MXTensor", "allowed: bfloat16 or float32; call .dequantize() first")


def out_dtype_of(op: str, dtype: object) -> torch.dtype:
    """`dtype`, or the dtype of that name; raises TypeError unless a product can return it."""
    named = {"bfloat16": torch.bfloat16, "float32": torch.float32}
    dtype = named.get(dtype, dtype) if isinstance(dtype, str) else dtype
    if not isinstance(dtype, torch.dtype) or dtype not in FLOATS:
        fail(TypeError, op, "out_dtype", repr(dtype), "allowed: torch.bfloat16, torch.float32, or their names")
    return dtype


def check_autocast(op: str, x: Tensor) -> None:
    """Raise TypeError under autocast to float16, which a layer whose rows are bf16 or MXFP8 would ignore."""
    device = x.device.type
    if x.is_meta or not torch.is_autocast_enabled(device) or torch.get_autocast_dtype(device) != torch.float16:
        return
    allowed = f"allowed: torch.bfloat16; or torch.autocast({device!r}, enabled=False) around this layer"
    fail(TypeError, op, "torch.autocast", "dtype torch.float16", allowed)


def check_flag(op: str, name: str, flag: object) -> None:
    """Raise TypeError unless the flag is a bool."""
    if not isinstance(flag, bool):
        fail(TypeError, op, name, repr(flag), "allowed: bool")


def check_int(op: str, name: str, value: Any, least: int) -> None:
    """Raise unless value is an int in [least, 2^31)."""
    if isinstance(value, bool) or not isinstance(value, int | torch.SymInt):
        fail(TypeError, op, name, repr(value), "allowed: an int")
    if isinstance(value, int) and not least <= value < 2**31:
        fail(ValueError, op, name, value, f"allowed: {least} to {2**31 - 1}")


def check_positive(op: str, name: str, value: Any) -> None:
    """Raise TypeError unless value is a number, ValueError unless it is above 0 and finite."""
    allowed = "allowed: a number above 0"
    if isinstance(value, bool) or not isinstance(value, int | float):
        fail(TypeError, op, name, repr(value), allowed)
    if not 0 < value < math.inf:
        fail(ValueError, op, name, value, allowed)


def check_shape(op: str, name: str, x: Tensor, shape: tuple[Any, ...]) -> None:
    """Raise ValueError unless x has this shape. A letter in `shape` stands for any size."""
    right = x.dim() == len(shape)
    for size, wanted in zip(x.shape, shape, strict=False):
        if isinstance(wanted, str):
            continue
        if torch.compiler.is_compiling():
            # After an all-to-all the number of rows is a sum of symbols: the check runs with the program.
            check(size == wanted)
        else:
            right = right and size == wanted
    if not right:
        sizes = ", ".join(map(str, shape)) + "," * (len(shape) == 1)
        fail(ValueError, op, name, f"shape {tuple(x.shape)}", f"allowed: ({sizes})")


def check_group_ends(
    op: str, name: str, ends: Tensor, x: Tensor, groups: int, x_name: str, weights: str, remedy: str | None = None,
    known: list[int] | None = None,
) -> Tensor:  # fmt: skip
    """ends (groups,) as int32; raises unless it is int32 or int64 and divides the rows of x into groups. remedy: the
    groups are whole blocks of 32 tokens, and the advice where they are not. known: the values, if the caller read
    them."""
    require_tensor(op, name, ends)
    if ends.dtype not in (torch.int32, torch.int64):
        fail(TypeError, op, name, f"dtype {ends.dtype}", "allowed: int32 or int64")
    if ends.shape != (groups,):
        allowed = f"allowed: ({groups},), one end per group of {weights}"
        fail(ValueError, op, name, f"shape {tuple(ends.shape)}", allowed)
    check_devices(op, x_name, x.device, **{name: ends})
    if remedy is not None and x.shape[0] % BLOCK:
        fail(ValueError, op, x_name, f"M = {x.shape[0]}", f"allowed: multiples of {BLOCK}; {remedy}")
    if reads_values(ends):  # a compiled program's op checks them when it runs
        values = ends.tolist() if known is None else known
        require_ends(op, name, values, x.shape[0], 1 if remedy is None else BLOCK, remedy or "")
    return ends.to(torch.int32).contiguous()


def check_bias(op: str, name: str, bias: Tensor, groups: int, n: int, device: torch.device) -> Tensor:
    """bias (N,) or (G, N) as (G, N) fp32; raises unless it is bf16 or fp32, of one of these shapes and on the
    device."""
    check_plain(op, name, bias)
    require_tensor(op, name, bias)
    if bias.dtype not in FLOATS:
        fail(TypeError, op, name, f"dtype {bias.dtype}", "allowed: bfloat16 or float32")
    if bias.shape not in ((n,), (groups, n)):
        fail(ValueError, op, name, f"shape {tuple(bias.shape)}", f"allowed: ({n},) or ({groups}, {n})")
    check_devices(op, "the weights", device, **{name: bias})
    # The cast comes before the expansion, so that the gradient is rounded after all sums.
    return bias.float().expand(groups, n)


def check_counts(op: str, name: str, counts: Tensor, device: torch.device | None) -> None:
    """Raise unless counts are of an integer dtype and on the device of the rows, if there are rows."""
    require_tensor(op, name, counts)
    if counts.dtype not in INTEGERS:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in INTEGERS)
        fail(TypeError, op, name, f"dtype {counts.dtype}", f"allowed: {allowed}")
    if device is not None and counts.device != device:
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
    """Raise unless probs is float32, of this shape and on the device of the rows."""
    check_plain(op, name, probs)
    require_tensor(op, name, probs)
    if probs.dtype != torch.float32:
        fail(TypeError, op, name, f"dtype {probs.dtype}", "allowed: float32")
    check_shape(op, name, probs, shape)
    check_devices(op, "the rows", device, **{name: probs})


def index_map(op: str, name: str, index: Tensor, device: torch.device, limit: Any, shape: tuple[Any, ...]) -> Tensor:
    """index as int32; raises unless it is int32 or int64, on the device and of that shape (see `check_shape`), with
    values from -1 (none) to limit - 1 if values are checked."""
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
    """Raise ValueError unless the two maps are inverse to each other, if values are checked. The gradient goes through
    the other map, so it would be wrong."""
    if not reads_values(there):
        return
    for name, one, other_name, other in ((back_name, back, there_name, there), (there_name, there, back_name, back)):
        rows = (other >= 0).nonzero().squeeze(1)
        wrong = one[other[rows].long()] != rows
        if wrong.any():
            i = int(rows[wrong][0])
            at = int(other[i])
            fail(ValueError, op, name, f"{int(one[at])} at {at}", f"allowed: {i}, since {other_name} has {at} at {i}")
