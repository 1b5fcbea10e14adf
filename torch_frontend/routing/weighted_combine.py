"""The weighted sum of each token's top-k rows, differentiable in the rows and in the probabilities.

rows (R, D), probs (T, K) --combine--> y (T, D)
drows (R, D), dprobs (T, K) <--combine_bwd-- dy (T, D), rows

rows (R, D) --combine--> y (T, D)          without probabilities no row is saved: the gradient copies
drows (R, D) <--gather-- dy (T, D)         each token's row to its slots

With a rounding, drows is an MXTensor: combine_bwd_row quantizes it, and without probabilities dy is quantized before
its bytes are copied.
"""

from typing import Any

import torch
from torch import Tensor

from ...core_kernels.launch import fail
from ..ops import direct as ops
from ..ops.checks import (
    check_floats,
    check_plain,
    check_probs,
    check_way_back,
    index_map,
    out_dtype_of,
)
from ..ops.differentiable import differentiable
from ..ops.launch import dtype_name
from ..ops.mx_tensor import MXTensor, dequantized, mx_rows
from ..products.gathered_rows import mapped_rows, quantized_rows


def sum_slots(rows: Tensor, slots: Tensor, out_dtype: torch.dtype) -> Tensor:
    """y[t] = the fp32 sum over k of rows[slots[t, k]], rounded once; for code below autograd."""
    unweighted = torch.empty(0, dtype=torch.float32, device=rows.device)
    return ops.combine(rows.contiguous(), slots, unweighted, dtype_name(out_dtype))


class _Weighted(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, probs: Tensor, slots: Tensor, order: Tensor, out_dtype: torch.dtype,
        rounding: int | None,
    ) -> Tensor:  # fmt: skip
        rows, probs = rows.contiguous(), probs.contiguous()
        ctx.save_for_backward(rows, probs, slots, order)
        ctx.rounding = rounding
        return ops.combine(rows, slots, probs, dtype_name(out_dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, probs, slots, order = ctx.saved_tensors
        dy = dequantized(grads[0]).contiguous()
        if ctx.rounding is None:
            drows, dprobs = ops.combine_bwd(dy, rows, slots, order, probs)
        else:
            q, sf, dprobs = ops.combine_bwd_row(dy, rows, slots, order, probs, ctx.rounding)
            drows = mx_rows(q, sf, rows.dtype)
        return drows, dprobs, None, None, None, None


class _Plain(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, slots: Tensor, token: Tensor, out_dtype: torch.dtype, rounding: int | None,
        folds: bool,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(token)
        ctx.dtype, ctx.rounding, ctx.folds = rows.dtype, rounding, folds
        return sum_slots(rows, slots, out_dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (token,) = ctx.saved_tensors
        if ctx.rounding is not None and isinstance(grads[0], MXTensor):  # its bytes, copied
            drows = mapped_rows(grads[0], token, ctx.dtype, ctx.folds)
        elif ctx.rounding is None:
            drows = ops.permute_rows(dequantized(grads[0]).to(ctx.dtype).contiguous(), token)
        else:
            drows = quantized_rows(dequantized(grads[0]).to(ctx.dtype), ctx.rounding, token, ctx.folds)
        return drows, None, None, None, None, None


def weigh_slots(x: Tensor, probs: Tensor) -> Tensor:
    """A row per slot: x (T, D) times probs (T, K), computed in fp32 -> (T K, D) bf16."""
    return (x[:, None].float() * probs[..., None].float()).flatten(0, 1).to(torch.bfloat16)


def sum_of_slots(rows: Tensor, top_k: int, out_dtype: torch.dtype) -> Tensor:
    """rows (T K, D), one per slot -> (T, D), summed in fp32 and rounded once."""
    return rows.unflatten(0, (-1, top_k)).sum(1, dtype=torch.float32).to(out_dtype)


weighted_sum = differentiable("weighted_combine", _Weighted)
"""weighted_sum(rows, probs, slots, order, out_dtype, rounding): `combine_slots` with probs, unchecked."""
plain_sum = differentiable("weighted_combine", _Plain)
"""plain_sum(rows, slots, token, out_dtype, rounding, folds): `combine_slots` without probs, unchecked. token: of each
row. folds: a folded product reads the gradient of rows next."""


def token_of(order: Tensor, top_k: int) -> Tensor:
    """The token of each row; -1, padding, stays -1."""
    return torch.div(order, top_k, rounding_mode="floor")


def weighted_combine(
    rows: Tensor, probs: Tensor | None, slots: Tensor, order: Tensor, *, out_dtype: torch.dtype | str | None = None
) -> Tensor:
    """y[t] = sum over k of probs[t, k] * rows[slots[t, k]], summed in fp32, k ascending, and rounded once.

    Args:
        rows: (R, D) bfloat16 or float32.
        probs: (T, K) float32, or None for an unweighted sum, which saves no rows for its gradient.
        slots: (T, K) int32 or int64, the row of each slot, -1 for none.
        order: (R,) int32 or int64, the map back: the slot t * K + k of each row, -1 for padding, whose gradient is
            zeros.
        out_dtype: bfloat16 or float32, or its name; None is the dtype of rows.

    Returns:
        (T, D). The gradients have their argument's dtype.

    Raises:
        ValueError: shapes, devices. On a CPU and within `debug_checks()` it also raises for slots outside of the rows
            and for an order that is not the map back.
        TypeError: dtypes.

    Example:
        >>> slots, order = torch.tensor([[1, 0]], dtype=torch.int32), torch.tensor([1, 0], dtype=torch.int32)
        >>> weighted_combine(torch.tensor([[1.0], [2.0]]), torch.tensor([[0.5, 0.25]]), slots, order).tolist()
        [[1.25]]
    """
    return combine_slots(rows, probs, slots, order, out_dtype, None)


def combine_slots(
    rows: Tensor, probs: Tensor | None, slots: Tensor, order: Tensor, out_dtype: torch.dtype | str | None,
    rounding: int | None, folds: bool = False,
) -> Tensor:  # fmt: skip
    """`weighted_combine`, whose gradient of rows is an MXTensor if there is a rounding; folds: of `plain_sum`."""
    op = "weighted_combine"
    check_plain(op, "rows", rows)
    check_floats(op, "rows", rows)
    slots = index_map(op, "slots", slots, rows.device, rows.shape[0], ("T", "K"))
    if slots.shape[1] < 1:
        fail(ValueError, op, "slots", f"shape {tuple(slots.shape)}", "allowed: (T, K), K at least 1")
    order = index_map(op, "order", order, rows.device, slots.numel(), rows.shape[:1])
    check_way_back(op, "slots", slots.view(-1), "order", order)
    out_dtype = rows.dtype if out_dtype is None else out_dtype_of(op, out_dtype)
    if probs is None:
        return plain_sum(rows, slots, token_of(order, slots.shape[1]), out_dtype, rounding, folds)
    check_probs(op, "probs", probs, tuple(slots.shape), rows.device)
    return weighted_sum(rows, probs, slots, order, out_dtype, rounding)
