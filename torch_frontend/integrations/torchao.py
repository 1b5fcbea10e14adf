"""The names and signatures of torchao's MXFP8 training functions, as thin aliases over this package's functions.

    torchao's name                                   this package
    _to_mxfp8_then_scaled_grouped_mm                 grouped_mm(x, w, group_ends, recipe="mxfp8"), here mxfp8_grouped_mm
    a2a_dispatch_mxfp8_fwd_hp_bwd                    ep.exchange_rows: quantizes in the forward
    a2a_combine_hp_fwd_mxfp8_bwd                     ep.exchange_rows: quantizes in the backward
    to_mxfp8_a2a_dequant                             ep.exchange_dequantized
    permute_mxfp8_fwd_hp_bwd                         ops.row_map, gather_rows
    unpermute_hp_fwd_mxfp8_bwd                       gather_rows
    ScaleCalculationMode                             Rounding

The names of arguments here are torchao's: `A`, `B_t` (G, K, N), `offs`, `scaling_mode`. docs/migrate/torchao.md lists
what differs on purpose. Nothing of torchao is imported: its enumerations are read by the names of their members.

Source: torchao.prototype.moe_training, commit 36027d82d of pytorch/ao.
"""

from collections.abc import Sequence
from enum import Enum
from typing import Any, cast, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from ...core_kernels.formats import BLOCK, Rounding
from ...core_kernels.launch import fail, require_choice
from ...core_kernels.policy.recipe import RECIPES, Compute, Recipe
from ..exchange.all_to_all import exchange_dequantized, exchange_rows
from ..exchange.process_groups import Splits, checked_all_to_all
from ..ops.checks import check_counts, check_flag, check_floats, check_int, index_map, reads_values
from ..ops.mx_tensor import MXTensor
from ..products.grouped_mm import Names, checked_grouped_mm
from ..products.weights import QuantizedWeights, Weights, check_float_weights
from ..routing.permute import gather, map_rows

ScaleCalculationMode = Rounding


def mxfp8_grouped_mm(
    A: Tensor,
    B_t: Weights,
    offs: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    kernel_preference: Any = "auto",
    wgrad_with_hp: bool = False,
    scale_calculation_mode: Rounding | str = Rounding.RCEIL,
    pad_token_groups_for_grouped_mm: bool = True,
    compute: Compute = "auto",
) -> Tensor:
    """`grouped_mm` with torchao's signature.

    Args:
        A: (M, K) bfloat16 or float32, or an MXTensor.
        B_t: (G, K, N), the transpose of a contiguous (G, N, K); or the QuantizedWeights of that (G, N, K).
        offs: (G,) int32 or int64, the end of each group of rows.
        bias: (N,) or (G, N) bfloat16 or float32; or None.
        out_dtype: torch.bfloat16 or torch.float32.
        kernel_preference: "auto", or "emulated" for compute="exact"; torchao's `KernelPreference` is read by name.
        wgrad_with_hp: recipe "mxfp8_wgrad_with_hp" instead of "mxfp8".
        scale_calculation_mode: a `Rounding` or its name.
        pad_token_groups_for_grouped_mm: `pad_token_groups` of `grouped_mm`.
        compute: "auto", "exact" or "fold", as in `Recipe`.

    Returns:
        (M, N) of out_dtype; rows past the last end are zeros.

    Raises:
        ValueError: shapes, layout, values of offs, as in `grouped_mm`; names that are not allowed.
        TypeError: dtypes.

    Example:
        >>> a, w = torch.ones(3, 32, dtype=torch.bfloat16), torch.ones(2, 64, 32, dtype=torch.bfloat16)
        >>> mxfp8_grouped_mm(a, w.mT, torch.tensor([1, 2], dtype=torch.int32))[:, 0].tolist()
        [32.0, 32.0, 0.0]
    """
    op = "mxfp8_grouped_mm"
    rounding = Rounding.parse(scale_calculation_mode, op, "scale_calculation_mode")
    compute = _preferred_compute(op, kernel_preference, compute)
    check_flag(op, "wgrad_with_hp", wgrad_with_hp)
    check_flag(op, "pad_token_groups_for_grouped_mm", pad_token_groups_for_grouped_mm)
    recipe = Recipe.parse("mxfp8", rounding=rounding, compute=compute, wgrad_with_hp=wgrad_with_hp)
    return _grouped_mm(op, A, B_t, offs, bias, out_dtype, recipe, pad_token_groups_for_grouped_mm)


_to_mxfp8_then_scaled_grouped_mm = mxfp8_grouped_mm


def bf16_grouped_mm(A: Tensor, B_t: Weights, offs: Tensor, out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """`grouped_mm` with recipe "bf16" and torchao's arguments.

    Args:
        A: (M, K) bfloat16 or float32, or an MXTensor.
        B_t: (G, K, N), the transpose of a contiguous (G, N, K); or the QuantizedWeights of that (G, N, K).
        offs: (G,) int32 or int64, the end of each group of rows.
        out_dtype: torch.bfloat16 or torch.float32.

    Returns:
        (M, N) of out_dtype; rows past the last end are zeros.

    Raises:
        ValueError: shapes, layout, values of offs, as in `grouped_mm`.
        TypeError: dtypes.

    Example:
        >>> a, w = torch.ones(3, 32, dtype=torch.bfloat16), torch.ones(2, 64, 32, dtype=torch.bfloat16)
        >>> bf16_grouped_mm(a, w.mT, torch.tensor([1, 2], dtype=torch.int32))[:, 0].tolist()
        [32.0, 32.0, 0.0]
    """
    return _grouped_mm("bf16_grouped_mm", A, B_t, offs, None, out_dtype, RECIPES["bf16"], False)


def fp8_rowwise_grouped_mm(A: Tensor, B_t: Weights, offs: Tensor, out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """`grouped_mm` with recipe "fp8_rowwise" and torchao's arguments.

    Args:
        A: (M, K) bfloat16 or float32, or an MXTensor.
        B_t: (G, K, N), the transpose of a contiguous (G, N, K); or the QuantizedWeights of that (G, N, K).
        offs: (G,) int32 or int64, the end of each group of rows.
        out_dtype: torch.bfloat16 or torch.float32.

    Returns:
        (M, N) of out_dtype; rows past the last end are zeros.

    Raises:
        ValueError: shapes, layout, values of offs, as in `grouped_mm`.
        TypeError: dtypes.

    Example:
        >>> a, w = torch.ones(3, 32, dtype=torch.bfloat16), torch.ones(2, 64, 32, dtype=torch.bfloat16)
        >>> fp8_rowwise_grouped_mm(a, w.mT, torch.tensor([1, 2], dtype=torch.int32))[:, 0].tolist()
        [32.0, 32.0, 0.0]
    """
    return _grouped_mm("fp8_rowwise_grouped_mm", A, B_t, offs, None, out_dtype, RECIPES["fp8_rowwise"], False)


def _grouped_mm(
    op: str,
    A: Tensor,
    B_t: Weights,
    offs: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    recipe: Recipe,
    pad: bool,
) -> Tensor:
    names = Names(op, "A", "B_t", "offs", "pad_token_groups_for_grouped_mm", "(G, K, N)")
    w = B_t
    if not isinstance(B_t, QuantizedWeights):
        check_float_weights(op, "B_t", B_t)
        w = B_t.transpose(-2, -1)
        if not w.is_contiguous():
            allowed = "allowed: the transpose of a contiguous (G, N, K): w.transpose(-2, -1)"
            fail(ValueError, op, "B_t", f"shape {tuple(B_t.shape)} with strides {B_t.stride()}", allowed)
    return checked_grouped_mm(names, A, w, offs, bias, out_dtype, recipe, pad)


def _preferred_compute(op: str, kernel_preference: Any, compute: Any) -> Any:
    """`compute`, or "exact" for torchao's preference EMULATED; raises unless the two agree."""
    name = kernel_preference.name if isinstance(kernel_preference, Enum) else kernel_preference
    if not isinstance(name, str) or name.lower() not in ("auto", "emulated"):
        error = ValueError if isinstance(name, str) else TypeError
        allowed = (
            "allowed: 'auto' or 'emulated', or torchao's members of these names; call force_implementation for more"
        )
        fail(error, op, "kernel_preference", repr(name), allowed)
    require_choice(op, "compute", compute, get_args(Compute))
    if name.lower() == "auto":
        return compute
    if compute not in ("auto", "exact"):
        allowed = "allowed: 'auto'; or compute='exact'"
        fail(ValueError, op, "kernel_preference", f"{name!r} with compute {compute!r}", allowed)
    return "exact"


def a2a_dispatch_mxfp8_fwd_hp_bwd(
    input: Tensor,
    output_splits: Splits,
    input_splits: Splits,
    group_name: "str | dist.ProcessGroup | None" = None,
    scaling_mode: Rounding | str = Rounding.RCEIL,
    block_size: int = BLOCK,
) -> MXTensor:
    """Quantize rows and send them to the ranks of their experts; the gradient comes back in `input`'s dtype.

    Args:
        input: (M, K) bfloat16 or float32, K a multiple of 32, sorted by destination rank.
        output_splits: output_splits[r] rows come from rank r.
        input_splits: input_splits[r] rows go to rank r.
        group_name: a process group or its name; None is the default group, or this process alone where
            torch.distributed is not initialised.
        scaling_mode: a `Rounding` or its name.
        block_size: 32.

    Returns:
        An MXTensor (sum(output_splits), K).

    Raises:
        ValueError: when the splits do not fit the input or the group. The ranks compare their arguments first, in one
            small all-gather for which the host waits: an error on one rank, or between two, raises on all ranks and no
            row is sent. Under torch.compile and during CUDA graph capture a rank checks its own alone.
        TypeError: other dtypes.

    Example:
        >>> a2a_dispatch_mxfp8_fwd_hp_bwd(torch.ones(3, 32), [3], [3]).dequantize().sum().item()
        96.0
    """
    name, rounding = checked_all_to_all(
        "a2a_dispatch_mxfp8_fwd_hp_bwd", input, output_splits, input_splits, "group_name", group_name,
        scaling_mode, block_size,
    )  # fmt: skip
    return cast(MXTensor, exchange_rows(input, list(output_splits), list(input_splits), name, True, False, rounding))


def a2a_combine_hp_fwd_mxfp8_bwd(
    input: Tensor,
    output_splits: Splits,
    input_splits: Splits,
    group_name: "str | dist.ProcessGroup | None" = None,
    scaling_mode: Rounding | str = Rounding.RCEIL,
    block_size: int = BLOCK,
    mxfp8_bwd: bool = True,
) -> Tensor:
    """Send expert outputs back to the tokens' ranks as they are; the gradient is sent in MXFP8.

    Args:
        input: (M, K) bfloat16 or float32, K a multiple of 32, sorted by destination rank.
        output_splits: output_splits[r] rows come from rank r: the input_splits of the dispatch.
        input_splits: input_splits[r] rows go to rank r: the output_splits of the dispatch.
        group_name: as in `a2a_dispatch_mxfp8_fwd_hp_bwd`.
        scaling_mode: a `Rounding` or its name, for the gradient.
        block_size: 32.
        mxfp8_bwd: the gradient is quantized, sent packed and returned as an MXTensor, which
            `unpermute_hp_fwd_mxfp8_bwd` and `grouped_mm` take. False: the gradient is sent in its own dtype, for any
            other operation in front of this one.

    Returns:
        (sum(output_splits), K) of input's dtype.

    Raises:
        ValueError: as in `a2a_dispatch_mxfp8_fwd_hp_bwd`.
        TypeError: other dtypes.

    Example:
        >>> a2a_combine_hp_fwd_mxfp8_bwd(torch.ones(3, 32), [3], [3]).shape
        torch.Size([3, 32])
    """
    name, rounding = checked_all_to_all(
        "a2a_combine_hp_fwd_mxfp8_bwd", input, output_splits, input_splits, "group_name", group_name,
        scaling_mode, block_size, mxfp8_bwd,
    )  # fmt: skip
    return exchange_rows(input, list(output_splits), list(input_splits), name, False, mxfp8_bwd, rounding)


def to_mxfp8_a2a_dequant(
    input: Tensor, output_splits: Splits, input_splits: Splits, group: "str | dist.ProcessGroup | None" = None
) -> Tensor:
    """All-to-all with MXFP8 rows between ranks in both directions, and input's dtype on each rank.

    A differentiable drop-in for `all_to_all_single_autograd`.

    Args:
        input: (M, K) bfloat16 or float32, K a multiple of 32, sorted by destination rank.
        output_splits: output_splits[r] rows come from rank r.
        input_splits: input_splits[r] rows go to rank r.
        group: a process group or its name; None is the default group, or this process alone where torch.distributed is
            not initialised.

    Returns:
        (sum(output_splits), K) of input's dtype: the dequantized rows.

    Raises:
        ValueError: as in `a2a_dispatch_mxfp8_fwd_hp_bwd`.
        TypeError: other dtypes.

    Example:
        >>> to_mxfp8_a2a_dequant(torch.full((1, 32), 1.06), [1], [1])[0, 0].item()
        1.0
    """
    name, _ = checked_all_to_all("to_mxfp8_a2a_dequant", input, output_splits, input_splits, "group", group)
    return exchange_dequantized(input, list(output_splits), list(input_splits), name)


def permute_mxfp8_fwd_hp_bwd(
    mx_tensor: Tensor,
    num_tokens_per_expert: Tensor,
    ep_degree: int,
    num_local_experts: int,
    group_size_multiple_of: int = BLOCK,
    use_mxfp8: bool = True,
    use_triton_for_bwd: bool = True,
) -> tuple[torch.Size, Tensor, Tensor, Tensor, Tensor]:
    """Gather received rows, rank-major, into one padded group per local expert.

    Args:
        mx_tensor: (M, K) MXTensor, bfloat16 or float32.
        num_tokens_per_expert: (ep_degree * num_local_experts,) of any integer dtype, on the rows' device.
        ep_degree: ranks that the rows came from.
        num_local_experts: experts of this rank.
        group_size_multiple_of: a positive multiple of 32; an empty expert has one aligned group.
        use_mxfp8: torchao's flag, without effect here.
        use_triton_for_bwd: torchao's flag, without effect here.

    Returns:
        (padded_shape, rows, permuted_indices, padded_counts, group_end_offsets): padded_shape = (M + 1, K); rows (P, K)
        of mx_tensor's kind; permuted_indices (P,) int32, -1 for padding, a row of zeros; padded_counts and
        group_end_offsets (num_local_experts,) int32. The gradient of the rows goes back to M rows in its own dtype.

    Raises:
        ValueError: counts that do not fit the rows, sizes.
        TypeError: dtypes, sizes that are no integers.

    Example:
        >>> counts = torch.tensor([1, 1, 0, 1])  # of 2 ranks and 2 experts
        >>> _, rows, indices, _, ends = permute_mxfp8_fwd_hp_bwd(torch.ones(3, 32), counts, 2, 2)
        >>> rows.shape, indices[::32].tolist(), ends.tolist()
        (torch.Size([96, 32]), [0, 1, -1], [32, 64])
    """
    op = "permute_mxfp8_fwd_hp_bwd"
    check_floats(op, "mx_tensor", mx_tensor)
    check_int(op, "ep_degree", ep_degree, 1)
    check_int(op, "num_local_experts", num_local_experts, 1)
    check_int(op, "group_size_multiple_of", group_size_multiple_of, BLOCK)
    if group_size_multiple_of % BLOCK:
        allowed = f"allowed: positive multiples of {BLOCK}"
        fail(ValueError, op, "group_size_multiple_of", group_size_multiple_of, allowed)
    check_flag(op, "use_mxfp8", use_mxfp8)
    check_flag(op, "use_triton_for_bwd", use_triton_for_bwd)
    name, rows, aligned = "num_tokens_per_expert", mx_tensor.shape[0], group_size_multiple_of
    check_counts(op, name, num_tokens_per_expert, mx_tensor.device)
    maps = map_rows(op, name, rows, num_tokens_per_expert, ep_degree, num_local_experts, aligned)
    groups = gather(mx_tensor, maps.row_map, maps.inverse)
    padded_shape = torch.Size((rows + 1, mx_tensor.shape[1]))
    return padded_shape, groups, maps.row_map, maps.padded_counts, maps.group_ends


def unpermute_hp_fwd_mxfp8_bwd(input: Tensor, permuted_indices: Tensor, padded_shape: Sequence[int]) -> Tensor:
    """Gather expert outputs back into the order in which the rows were received.

    Args:
        input: (P, N) bfloat16 or float32.
        permuted_indices: (P,) int32 or int64, of `permute_mxfp8_fwd_hp_bwd`.
        padded_shape: (M + 1, K or N), of `permute_mxfp8_fwd_hp_bwd`.

    Returns:
        (M, N). An MXTensor gradient stays an MXTensor.

    Raises:
        ValueError: other shapes.
        TypeError: other dtypes.

    Example:
        >>> padded_shape, rows, indices, _, _ = permute_mxfp8_fwd_hp_bwd(torch.ones(3, 32), torch.tensor([1, 2]), 1, 2)
        >>> unpermute_hp_fwd_mxfp8_bwd(rows, indices, padded_shape).shape
        torch.Size([3, 32])
    """
    op = "unpermute_hp_fwd_mxfp8_bwd"
    check_floats(op, "input", input)
    if not isinstance(padded_shape, tuple | list):
        fail(TypeError, op, "padded_shape", repr(padded_shape), "allowed: (rows + 1, dim)")
    if len(padded_shape) != 2:
        fail(ValueError, op, "padded_shape", tuple(padded_shape), "allowed: (rows + 1, dim)")
    for size, least in zip(padded_shape, (1, 0), strict=True):
        check_int(op, "padded_shape", size, least)
    rows = padded_shape[0] - 1
    shape = input.shape[:1]
    permuted_indices = index_map(op, "permuted_indices", permuted_indices, input.device, rows, shape)
    if reads_values(permuted_indices):
        used = permuted_indices[permuted_indices >= 0]
        if used.unique().numel() < used.numel():
            twice = f"{used.numel() - used.unique().numel()} repeated indices"
            fail(ValueError, op, "permuted_indices", twice, "allowed: each row of padded_shape once")
    # All padding rows write the one slot behind the real rows, which is dropped.
    targets = torch.where(permuted_indices < 0, rows, permuted_indices).long()
    sources = torch.arange(input.shape[0], dtype=torch.int32, device=input.device)
    inverse = permuted_indices.new_full((rows + 1,), -1).scatter_(0, targets, sources)[:rows]
    return gather(input, inverse, permuted_indices)
