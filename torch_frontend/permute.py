"""Rows on their way between tokens and padded groups; every step is one gather, forward and backward.

    spread     x (T, D) ------order // top_k--> rows (T K, D), sorted by expert     backward: sum over K
    permute    rows (M, K) ---row_map---------> padded groups (P, K)                backward: inverse
    unpermute  groups (P, N) -inverse---------> rows (M, N)                         backward: row_map

MX rows stay MX, forward and backward; padding (-1 in a map) is zeros.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core_kernels.formats import BLOCK
from ..core_kernels.launch import fail
from . import ops
from ._call import checks_values, require_tensor
from ._differentiable import differentiable
from .combine import sum_slots
from .mx_tensor import MXTensor, plain


class RowMaps(NamedTuple):
    """Where rows go: `row_map` (P,) gathers received rows into padded groups, `inverse` (M,) back;
    `padded_counts` and `group_ends` (local experts,) describe the groups. All int32."""

    row_map: Tensor
    inverse: Tensor
    padded_counts: Tensor
    group_ends: Tensor


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, row_map: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return _gather(x, row_map)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return _gather(grads[0], inverse), None, None


def _gather(x: Tensor, row_map: Tensor) -> Tensor:
    if isinstance(x, MXTensor):
        q, sf = ops.permute_q_sf(x.q, x.sf, row_map)
        return MXTensor(q, sf, x.orig_dtype)
    return ops.permute_rows(x.contiguous(), row_map)


_gathered = differentiable("gather_rows", _Gather)


def gather_rows(x: Tensor, row_map: Tensor, inverse: Tensor) -> Tensor:
    """Return x[row_map], zeros where the map is -1; the gradient goes through `inverse`.

    x: (M, K) bfloat16, float32 or MXTensor; row_map: (P,) int32; inverse: (M,) int32, the map back.
    An MXTensor comes out as one, and an MXTensor gradient goes in as one.
    """
    return _gathered(x, row_map, inverse)


class _Spread(torch.autograd.Function):
    """x (T, D) -> (P, D); backward adds up the copies in a fixed order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.copies = copies
        return _gather(x, order // copies)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        dx = sum_slots(plain(grads[0]), inverse.view(-1, ctx.copies), grads[0].dtype)
        return dx, None, None, None


_spread = differentiable("spread_rows", _Spread)


def spread_rows(x: Tensor, order: Tensor, inverse: Tensor, copies: int) -> Tensor:
    """Copy each token to its `copies` slots: out[i] = x[order[i] // copies], zeros where order is -1.

    x: (T, D) bfloat16, float32 or MXTensor, whose bytes are copied; order: (P,) int32, the slot t * copies + c that
    each row of the result fills; inverse: (T * copies,) int32, the way back. For `order` and `inverse` of
    `sort_by_expert` P is T * copies. The gradient of a token is the fp32 sum over its slots, rounded once.
    """
    return _spread(x, order, inverse, copies)


def map_rows(op: str, x: Tensor, counts: Tensor, ep_degree: int, num_local_experts: int, alignment: int) -> RowMaps:
    """Check counts (ep_degree * num_local_experts,) of any integer dtype and plan the padded groups of x's rows."""
    require_tensor(op, "num_tokens_per_expert", counts)
    if counts.dtype.is_floating_point or counts.dtype.is_complex or counts.dtype == torch.bool:
        fail(TypeError, op, "num_tokens_per_expert", f"dtype {counts.dtype}", "allowed: integers")
    if counts.shape != (ep_degree * num_local_experts,):
        allowed = f"allowed: ({ep_degree * num_local_experts},) = ep_degree * num_local_experts"
        fail(ValueError, op, "num_tokens_per_expert", f"shape {tuple(counts.shape)}", allowed)
    if counts.device != x.device:
        allowed = f"allowed: {x.device}, where the rows are; move it with .to()"
        fail(ValueError, op, "num_tokens_per_expert", f"device {counts.device}", allowed)
    # While compiling there are no values; the op checks them again when it runs.
    if not torch.compiler.is_compiling() and checks_values(counts.device) and int(counts.sum()) != x.shape[0]:
        got = f"{counts.tolist()}, in total {int(counts.sum())}"
        fail(ValueError, op, "num_tokens_per_expert", got, f"allowed: a total of {x.shape[0]}, the rows received")
    counts = counts.to(torch.int32).contiguous()
    return RowMaps(*ops.row_map(counts, x.shape[0], num_local_experts, alignment))


def permute_mxfp8_fwd_hp_bwd(
    mx_tensor: Tensor,
    num_tokens_per_expert: Tensor,
    ep_degree: int,
    num_local_experts: int,
    group_size_multiple_of: int = BLOCK,
    use_mxfp8: bool = True,
    use_triton_for_bwd: bool = True,
) -> tuple[torch.Size, Tensor, Tensor, Tensor, Tensor]:
    """Bring received rows, rank-major, into one padded group per local expert.

    mx_tensor: MXTensor (M, K), or bf16/fp32 rows. num_tokens_per_expert: (ep_degree * num_local_experts,),
    any integer dtype, on the rows' device. group_size_multiple_of: a positive multiple of 32; an empty
    expert still gets one aligned group. The last two arguments are torchao's and change nothing here.

    Returns (padded_shape, rows, permuted_indices, padded_counts, group_end_offsets): padded_shape =
    (M + 1, K); rows (P, K) like mx_tensor; permuted_indices (P,) int32, -1 for padding, which is zeros;
    padded_counts and group_end_offsets (num_local_experts,) int32. The gradient of the rows is bf16
    (or what it came as) and goes back to M rows. Raises ValueError and TypeError on counts that do not fit.
    """
    op = "permute_mxfp8_fwd_hp_bwd"
    maps = map_rows(op, mx_tensor, num_tokens_per_expert, ep_degree, num_local_experts, group_size_multiple_of)
    rows = gather_rows(mx_tensor, maps.row_map, maps.inverse)
    padded_shape = torch.Size((mx_tensor.shape[0] + 1, mx_tensor.shape[1]))
    return padded_shape, rows, maps.row_map, maps.padded_counts, maps.group_ends


def unpermute_hp_fwd_mxfp8_bwd(input: Tensor, permuted_indices: Tensor, padded_shape: Sequence[int]) -> Tensor:
    """Bring expert outputs back to the order in which the rows were received.

    input: (P, N) bfloat16 or float32; permuted_indices (P,) int32 and padded_shape (M + 1, K or N) as
    `permute_mxfp8_fwd_hp_bwd` returned them. Returns (M, N). The gradient is permuted as it comes:
    an MXTensor leaves as an MXTensor, without being dequantized. Raises ValueError on other shapes.
    """
    op = "unpermute_hp_fwd_mxfp8_bwd"
    require_tensor(op, "input", input)
    require_tensor(op, "permuted_indices", permuted_indices)
    if permuted_indices.dtype != torch.int32:
        fail(TypeError, op, "permuted_indices", f"dtype {permuted_indices.dtype}", "allowed: int32")
    if len(padded_shape) != 2 or padded_shape[0] < 1:
        fail(ValueError, op, "padded_shape", tuple(padded_shape), "allowed: (rows + 1, dim)")
    if permuted_indices.shape != (input.shape[0],):
        allowed = f"allowed: ({input.shape[0]},), one index per row of input"
        fail(ValueError, op, "permuted_indices", f"shape {tuple(permuted_indices.shape)}", allowed)
    rows = padded_shape[0] - 1
    if not torch.compiler.is_compiling() and checks_values(input.device) and input.shape[0]:
        low, high = permuted_indices.min().item(), permuted_indices.max().item()
        if low < -1 or high >= rows:
            allowed = f"allowed: -1 to {rows - 1}, the rows of padded_shape less its last"
            fail(ValueError, op, "permuted_indices", f"values from {low} to {high}", allowed)
    # Padding rows all write the one slot behind the real ones, which is dropped.
    targets = torch.where(permuted_indices < 0, rows, permuted_indices).long()
    sources = torch.arange(input.shape[0], dtype=torch.int32, device=input.device)
    inverse = permuted_indices.new_full((rows + 1,), -1).scatter_(0, targets, sources)[:rows]
    return gather_rows(input, inverse.contiguous(), permuted_indices)
