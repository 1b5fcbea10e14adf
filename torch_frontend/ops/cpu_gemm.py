"""Grouped products on a CPU: dequantize in C++ to fp32 (exact), then torch.matmul per group.

    lhs [g0 g0 g1 | tail]  x  rhs_t[g]^T  -->  out [g0 g0 g1 | unwritten]

Products of fp32 values that come from E4M3 or bf16 are exact. The only errors are from the fp32 accumulation and the
one rounding to the output dtype. A row is read by its own group alone: a NaN in a row past the last end has no effect.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ... import cpp_bindings
from ...core_kernels.formats import BLOCK, E8M0_BIAS, SPAN, SQUARE


def _dequantize(q: Tensor, sf: Tensor) -> Tensor:
    out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    cpp_bindings.run("dequantize", [q, sf], [out], [], torch.get_num_threads())
    return out


def _groups(group_ends: Tensor) -> Iterator[tuple[int, slice]]:
    start = 0
    for group, end in enumerate(group_ends.tolist()):
        yield group, slice(start, end)
        start = end


def _m_grouped(
    lhs: Tensor, rhs_t: Callable[[int], Tensor], group_ends: Tensor, out: Tensor, bias: Tensor | None = None
) -> None:
    for group, rows in _groups(group_ends):
        if rows.start < rows.stop:
            product = lhs[rows] @ rhs_t(group).T
            out[rows] = product if bias is None else product + bias[group]


def grouped_mm_mx(
    lhs_q: Tensor, lhs_sf: Tensor, rhs_q: Tensor, rhs_sf: Tensor, group_ends: Tensor, out: Tensor
) -> None:
    # The weights of one expert at a time: fp32 copies of all would be four times the bytes.
    _m_grouped(_dequantize(lhs_q, lhs_sf), lambda g: _dequantize(rhs_q[g], rhs_sf[g]), group_ends, out)


def grouped_mm_bf16(lhs: Tensor, rhs_t: Tensor, group_ends: Tensor, out: Tensor) -> None:
    _m_grouped(lhs.float(), lambda g: rhs_t[g].float(), group_ends, out)


def grouped_mm_bf16_kn(lhs: Tensor, rhs: Tensor, group_ends: Tensor, out: Tensor) -> None:
    _m_grouped(lhs.float(), lambda g: rhs[g].float().T, group_ends, out)


def _add_two(
    product: Callable[..., None], first: tuple[Tensor, ...], second: tuple[Tensor, ...], group_ends: Tensor, out: Tensor
) -> None:
    """Both products in fp32, added and rounded."""
    sums = torch.empty((2, *out.shape), dtype=torch.float32, device=out.device)
    for operands, total in ((first, sums[0]), (second, sums[1])):
        product(*operands, group_ends, total)
    torch.add(sums[0], sums[1], out=out)


def grouped_mm_bf16_kn_sum(
    lhs: Tensor, rhs: Tensor, lhs2: Tensor, rhs2: Tensor, group_ends: Tensor, out: Tensor
) -> None:
    _add_two(grouped_mm_bf16_kn, (lhs, rhs), (lhs2, rhs2), group_ends, out)


def _k_grouped(lhs_t: Tensor, rhs_t: Tensor, group_ends: Tensor, out: Tensor) -> None:
    for group, tokens in _groups(group_ends):
        out[group] = lhs_t[:, tokens] @ rhs_t[:, tokens].T


def grouped_wgrad_mx(
    lhs_q: Tensor, lhs_sf: Tensor, rhs_q: Tensor, rhs_sf: Tensor, group_ends: Tensor, out: Tensor
) -> None:
    _k_grouped(_dequantize(lhs_q, lhs_sf), _dequantize(rhs_q, rhs_sf), group_ends, out)


def grouped_wgrad_bf16(lhs: Tensor, rhs: Tensor, group_ends: Tensor, out: Tensor) -> None:
    _k_grouped(lhs.float().T, rhs.float().T, group_ends, out)


def grouped_wgrad_bf16_t(lhs_t: Tensor, rhs_t: Tensor, group_ends: Tensor, out: Tensor) -> None:
    _k_grouped(lhs_t.float(), rhs_t.float(), group_ends, out)


def _dequantize_folded(qf: Tensor, sf: Tensor) -> Tensor:
    """qf (R, K), sf (R,) -> fp32."""
    return _dequantize(qf, sf[:, None].expand(-1, qf.shape[1] // BLOCK).contiguous())


def grouped_mm_fold(
    lhs_qf: Tensor, lhs_sf: Tensor, rhs_qf: Tensor, rhs_sf: Tensor, group_ends: Tensor, out: Tensor
) -> None:
    lhs = _dequantize_folded(lhs_qf, lhs_sf)
    _m_grouped(lhs, lambda g: _dequantize_folded(rhs_qf[g], rhs_sf[g]), group_ends, out)


def grouped_mm_fold_bias(
    lhs_qf: Tensor, lhs_sf: Tensor, rhs_qf: Tensor, rhs_sf: Tensor, bias: Tensor, group_ends: Tensor, out: Tensor
) -> None:
    lhs = _dequantize_folded(lhs_qf, lhs_sf)
    _m_grouped(lhs, lambda g: _dequantize_folded(rhs_qf[g], rhs_sf[g]), group_ends, out, bias)


def grouped_mm_fold_sum(
    lhs_qf: Tensor, lhs_sf: Tensor, rhs_qf: Tensor, rhs_sf: Tensor,
    lhs2_qf: Tensor, lhs2_sf: Tensor, rhs2_qf: Tensor, rhs2_sf: Tensor, group_ends: Tensor, out: Tensor,
) -> None:  # fmt: skip
    first, second = (lhs_qf, lhs_sf, rhs_qf, rhs_sf), (lhs2_qf, lhs2_sf, rhs2_qf, rhs2_sf)
    _add_two(grouped_mm_fold, first, second, group_ends, out)


def grouped_mm_fold_pair(
    lhs_qf: Tensor, lhs_sf: Tensor, rhs_qf: Tensor, rhs_sf: Tensor, rhs2_qf: Tensor, rhs2_sf: Tensor,
    group_ends: Tensor, out: Tensor, out2: Tensor,
) -> None:  # fmt: skip
    grouped_mm_fold(lhs_qf, lhs_sf, rhs_qf, rhs_sf, group_ends, out)
    grouped_mm_fold(lhs_qf, lhs_sf, rhs2_qf, rhs2_sf, group_ends, out2)


def _dequantize_rows(q: Tensor, sf: Tensor) -> Tensor:
    """q (R, K), sf (R, ceil(K/128)) fp32 -> fp32, rounded once."""
    ones = torch.full((q.shape[0], q.shape[1] // BLOCK), E8M0_BIAS, dtype=torch.uint8, device=q.device)
    return _dequantize(q, ones).mul_(sf.repeat_interleave(SQUARE, 1)[:, : q.shape[1]])


def _dequantize_squares(q: Tensor, sf: Tensor) -> Tensor:
    """q (R, K), sf (ceil(R/128), ceil(K/128)) fp32 -> fp32, rounded once."""
    return _dequantize_rows(q, sf.repeat_interleave(SQUARE, 0)[: q.shape[0]])


def grouped_mm_blockwise(
    lhs_q: Tensor, lhs_sf: Tensor, rhs_q: Tensor, rhs_sf: Tensor, group_ends: Tensor, out: Tensor
) -> None:
    lhs = _dequantize_rows(lhs_q, lhs_sf)
    _m_grouped(lhs, lambda g: _dequantize_squares(rhs_q[g], rhs_sf[g]), group_ends, out)


def grouped_mm_blockwise_sum(
    lhs_q: Tensor, lhs_sf: Tensor, rhs_q: Tensor, rhs_sf: Tensor,
    lhs2_q: Tensor, lhs2_sf: Tensor, rhs2_q: Tensor, rhs2_sf: Tensor, group_ends: Tensor, out: Tensor,
) -> None:  # fmt: skip
    first, second = (lhs_q, lhs_sf, rhs_q, rhs_sf), (lhs2_q, lhs2_sf, rhs2_q, rhs2_sf)
    _add_two(grouped_mm_blockwise, first, second, group_ends, out)


def _dequantize_spans(qf: Tensor, sf: Tensor, group_ends: Tensor) -> Tensor:
    """qf (R, M), sf (S, R) -> fp32; columns past the last end, which are not read, get any scale."""
    first = torch.arange(0, qf.shape[1], BLOCK, dtype=group_ends.dtype, device=qf.device)
    group = torch.searchsorted(group_ends, first, right=True)
    begin = torch.cat([group_ends.new_zeros(1), group_ends])[group]
    slot = begin // SPAN + group + (first - begin) // SPAN
    slots = torch.cat(
        [sf, sf.new_zeros(1, sf.shape[1])]
    )  # columns past the last end may get the slot after the last one
    return _dequantize(qf, slots[slot].T.contiguous())


def grouped_wgrad_fold(
    lhs_qf: Tensor, lhs_sf: Tensor, rhs_qf: Tensor, rhs_sf: Tensor, group_ends: Tensor, out: Tensor
) -> None:
    lhs, rhs = _dequantize_spans(lhs_qf, lhs_sf, group_ends), _dequantize_spans(rhs_qf, rhs_sf, group_ends)
    _k_grouped(lhs, rhs, group_ends, out)


def grouped_wgrad_fold_pair(
    lhs_qf: Tensor, lhs_sf: Tensor, rhs_qf: Tensor, rhs_sf: Tensor, lhs2_qf: Tensor, lhs2_sf: Tensor,
    group_ends: Tensor, out: Tensor, out2: Tensor,
) -> None:  # fmt: skip
    grouped_wgrad_fold(lhs_qf, lhs_sf, rhs_qf, rhs_sf, group_ends, out)
    grouped_wgrad_fold(lhs2_qf, lhs2_sf, rhs_qf, rhs_sf, group_ends, out2)


def logits_bwd(dlogits: Tensor, weight: Tensor, dx: Tensor, out: Tensor) -> None:
    total = dlogits.float() @ torch.cat([weight, weight]).float()
    torch.add(total, dx if dx.dim() == 2 else 0, out=out)


TABLE: dict[str, Callable[..., None]] = {
    "grouped_mm_mx": grouped_mm_mx,
    "grouped_mm_bf16": grouped_mm_bf16,
    "grouped_mm_bf16_kn": grouped_mm_bf16_kn,
    "grouped_mm_bf16_kn_sum": grouped_mm_bf16_kn_sum,
    "grouped_wgrad_mx": grouped_wgrad_mx,
    "grouped_wgrad_bf16": grouped_wgrad_bf16,
    "grouped_wgrad_bf16_t": grouped_wgrad_bf16_t,
    "grouped_mm_fold": grouped_mm_fold,
    "grouped_mm_fold_bias": grouped_mm_fold_bias,
    "grouped_mm_fold_sum": grouped_mm_fold_sum,
    "grouped_mm_fold_pair": grouped_mm_fold_pair,
    "grouped_wgrad_fold": grouped_wgrad_fold,
    "grouped_wgrad_fold_pair": grouped_wgrad_fold_pair,
    "grouped_mm_blockwise": grouped_mm_blockwise,
    "grouped_mm_blockwise_sum": grouped_mm_blockwise_sum,
    "logits_bwd": logits_bwd,
}
"""Ops that run here on a CPU: functions of the inputs and of the outputs, which they write."""
