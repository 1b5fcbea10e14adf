"""Every op as a PyTorch user writes it for `torch.compile`; the bytes are the kernels'.

A formula writes into existing outputs, as the kernels do; the compiler fuses these copies.
"""

import torch
from mxep.core_kernels.formats import GRADIENT_HEADROOM, HEADROOM, WEIGHT_HEADROOM
from torch import Tensor


def _encode(blocks: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """fp32 blocks -> E4M3 bytes, and E8M0 bytes with `dim` kept as 1; RCEIL."""
    amax = blocks.abs().amax(dim, keepdim=True)
    bits = (amax / 448.0).view(torch.int32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    byte = exponent + torch.where(exponent == 0, mantissa > 0x400000, mantissa != 0).int()
    byte = torch.where(amax.isfinite(), byte, 255)
    inverse = torch.where(byte < 254, (254 - byte) << 23, 0x400000).view(torch.float32)
    inverse = torch.where(byte == 255, float("nan"), inverse)
    q = (blocks * inverse).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    return q, byte.to(torch.uint8)


def quantize_row(x: Tensor, q: Tensor, sf: Tensor) -> None:
    codes, bytes_ = _encode(x.unflatten(-1, (-1, 32)).float(), -1)
    q.copy_(codes.flatten(-2))
    sf.copy_(bytes_.squeeze(-1))


def quantize_col(x: Tensor, q_t: Tensor, sf_t: Tensor) -> None:
    # Transposing first is the fastest of three ways to write it.
    quantize_row(x.t().contiguous(), q_t, sf_t)


def quantize_both(x: Tensor, q: Tensor, sf: Tensor, q_t: Tensor, sf_t: Tensor) -> None:
    quantize_row(x, q, sf)
    if not x.is_cuda:
        torch._dynamo.graph_break()  # inductor 2.13 fails to split loops of C++ that reduce along both dims
    quantize_col(x, q_t, sf_t)


def scale(sf: Tensor) -> Tensor:
    """E8M0 bytes -> fp32 powers of two."""
    exponent = sf.int()
    scale = torch.where(exponent == 0, 0x400000, exponent << 23).view(torch.float32)
    return torch.where(exponent == 255, float("nan"), scale)


def quantize_row_fold(x: Tensor, qf: Tensor, row_sf: Tensor, *, headroom: int = 0) -> None:
    codes, bytes_ = _encode(x.unflatten(-1, (-1, 32)).float(), -1)
    finite = torch.where(bytes_ == 255, -1, bytes_.int())
    largest = finite.amax(-2, keepdim=True)
    codes = codes.view(torch.float8_e4m3fn)
    if headroom:
        first = finite[..., : 256 // 32, :].amax(-2, keepdim=True)
        least = torch.where(first < 0, -1, (first + headroom).clamp(max=254))
        raised, largest = torch.maximum(finite, least), torch.maximum(largest, least)
        codes = (codes.float() * torch.exp2((finite - raised).float())).to(torch.float8_e4m3fn)
        finite = raised
    factor = torch.where(bytes_ == 255, float("nan"), torch.exp2((finite - largest).float()))
    qf.copy_((codes.float() * factor).to(torch.float8_e4m3fn).view(torch.uint8).flatten(-2))
    row_sf.copy_(largest.flatten(-3).to(torch.uint8))  # -1, a row of NaN blocks, wraps to 255


def _chunk_scales(sf_t: Tensor, group_ends: Tensor, num_slots: int) -> tuple[Tensor, Tensor, Tensor]:
    """sf_t (K, M/32) -> scale of every chunk (K, S), chunk of every block, and whether a group owns the block."""
    block = torch.arange(0, 32 * sf_t.shape[1], 32, dtype=torch.int32, device=sf_t.device)
    group = torch.searchsorted(group_ends, block, right=True, out_int32=True)
    owned, begins = group < len(group_ends), torch.nn.functional.pad(group_ends, (1, 0))
    slot = begins[group] // 256 + group + (block - begins[group]) // 256
    slot = slot.clamp(max=num_slots - 1).long()
    first = begins[:-1] // 256 + torch.arange(len(group_ends), dtype=torch.int32, device=sf_t.device)
    slots = torch.arange(num_slots, dtype=torch.int32, device=sf_t.device)
    group_of = torch.searchsorted(first, slots, right=True, out_int32=True) - 1
    rank = slots - first[group_of]
    # Byte + 1: 0 is a chunk without a finite scale.
    largest = torch.where(owned & (sf_t != 255), sf_t.int() + 1, 0)
    largest = largest.new_zeros(len(sf_t), num_slots).scatter_reduce(1, slot.expand_as(largest), largest, "amax")
    largest = torch.where((rank == 0) & (largest > 0), largest + HEADROOM, largest).clamp(max=255)
    so_far = (largest + 256 * group_of).cummax(1).values - 256 * group_of
    used = 256 * rank < torch.diff(begins)[group_of]
    return torch.where(used, so_far - 1, 0).clamp(min=0), slot, owned


def _fold_columns(x: Tensor, group_ends: Tensor, qf_t: Tensor, chunk_sf: Tensor) -> None:
    codes, bytes_ = _encode(x.t().contiguous().unflatten(-1, (-1, 32)).float(), -1)
    scales, slot, owned = _chunk_scales(bytes_.squeeze(-1), group_ends, len(chunk_sf))
    shift = (bytes_.int() - scales[:, slot].unsqueeze(-1)).float()
    factor = torch.where(bytes_ == 255, float("nan"), torch.exp2(shift))
    folded = (codes.view(torch.float8_e4m3fn).float() * factor).to(torch.float8_e4m3fn).view(torch.uint8)
    qf_t.copy_(torch.where(owned[:, None], folded, 0).flatten(-2))
    chunk_sf.copy_(scales.t())


def quantize_both_fold(
    x: Tensor, group_ends: Tensor, qf: Tensor, row_sf: Tensor, qf_t: Tensor, chunk_sf: Tensor, headroom: int = 0
) -> None:
    quantize_row_fold(x, qf, row_sf, headroom=headroom)
    if not x.is_cuda:
        torch._dynamo.graph_break()  # as in quantize_both
    _fold_columns(x, group_ends, qf_t, chunk_sf)


def requantize_col_fold(q: Tensor, sf: Tensor, group_ends: Tensor, qf_t: Tensor, chunk_sf: Tensor) -> None:
    blocks = q.view(torch.float8_e4m3fn).float().unflatten(-1, (-1, 32))
    _fold_columns((blocks * scale(sf).unsqueeze(-1)).flatten(-2).to(torch.bfloat16), group_ends, qf_t, chunk_sf)


def quantize_matrix_fold(x: Tensor, qf: Tensor, row_sf: Tensor, qf_t: Tensor, col_sf: Tensor) -> None:
    quantize_row_fold(x, qf, row_sf, headroom=WEIGHT_HEADROOM)
    if not x.is_cuda:
        torch._dynamo.graph_break()  # as in quantize_both
    quantize_row_fold(x.mT.contiguous(), qf_t, col_sf, headroom=WEIGHT_HEADROOM)


def quantize_matrix_fold_t(x: Tensor, qf_t: Tensor, col_sf: Tensor) -> None:
    quantize_row_fold(x.mT.contiguous(), qf_t, col_sf, headroom=WEIGHT_HEADROOM)


def quantize_rowwise(x: Tensor, qf: Tensor, row_sf: Tensor) -> None:
    codes, bytes_ = _encode(x.float(), -1)
    qf.copy_(codes)
    row_sf.copy_(bytes_.squeeze(-1))


def dequantize(q: Tensor, sf: Tensor, x: Tensor) -> None:
    blocks = q.view(torch.float8_e4m3fn).float().unflatten(-1, (-1, 32))
    x.copy_((blocks * scale(sf).unsqueeze(-1)).flatten(-2))


def permute_rows(x: Tensor, row_map: Tensor, out: Tensor) -> None:
    rows = row_map.long()
    out.copy_(torch.where(rows[:, None] < 0, 0, x[rows.clamp(min=0)]))


def permute_mx(packed: Tensor, row_map: Tensor, q: Tensor, sf: Tensor) -> None:
    k = q.shape[1]
    permute_rows(packed[:, :k], row_map, q)
    permute_rows(packed[:, k:], row_map, sf)


def sort_by_expert(ids: Tensor, order: Tensor, inverse: Tensor, counts: Tensor) -> None:
    sorted_ = torch.argsort(ids, stable=True)
    order.copy_(sorted_)
    inverse[sorted_] = torch.arange(len(ids), dtype=torch.int32, device=ids.device)
    # bincount would break the graph
    counts.copy_((ids[:, None] == torch.arange(len(counts), device=ids.device)).sum(0))


def row_map(counts: Tensor, row_map: Tensor, inverse: Tensor, padded_counts: Tensor, group_ends: Tensor) -> None:
    """Without slack rows; groups padded to multiples of 32."""
    per_rank = counts.view(-1, len(group_ends))
    padded_counts.copy_((per_rank.sum(0) + 31).clamp(min=32) // 32 * 32)
    group_ends.copy_(padded_counts.cumsum(0))
    before = per_rank.cumsum(0) - per_rank + (group_ends - padded_counts)  # first row of each rank within a group
    received = counts.cumsum(0)
    row = torch.arange(len(inverse), device=counts.device)
    pair = torch.searchsorted(received, row, right=True)
    target = before.flatten()[pair] + row - (received - counts)[pair]
    inverse.copy_(target)
    row_map.fill_(-1)
    row_map[target] = row.int()


def route(logits: Tensor, bias: Tensor, ids: Tensor, weights: Tensor, share_sums: Tensor) -> None:
    scores = logits.softmax(-1)
    chosen, experts = scores.topk(ids.shape[1])
    ids.copy_(experts)
    weights.copy_(chosen / chosen.sum(-1, keepdim=True))
    share_sums.copy_(torch.nn.functional.pad(scores, (0, 0, 0, -len(scores) % 8)).unflatten(0, (-1, 8)).sum(1))


def route_bwd(dweights: Tensor, dshares: Tensor, logits: Tensor, ids: Tensor, dlogits: Tensor) -> None:
    scores = logits.softmax(-1)
    chosen = scores.gather(1, ids.long())
    total = chosen.sum(-1, keepdim=True)
    d = (dweights - (dweights * chosen / total).sum(-1, keepdim=True)) / total
    d = dshares + torch.zeros_like(scores).scatter(1, ids.long(), d)
    dlogits.copy_(scores * (d - (d * scores).sum(-1, keepdim=True)))


def routing(ids: Tensor, order: Tensor, inverse: Tensor, counts: Tensor, *maps: Tensor) -> None:
    sort_by_expert(ids, order, inverse, counts)
    row_map(counts, *maps)


def _swiglu(gate: Tensor, up: Tensor, prob: Tensor) -> Tensor:
    return (torch.nn.functional.silu(gate.float()) * up.float() * prob[:, None]).bfloat16()


def swiglu_row(gate: Tensor, up: Tensor, prob: Tensor, *out: Tensor) -> None:
    quantize_row(_swiglu(gate, up, prob), *out)


def swiglu_row_fold(gate: Tensor, up: Tensor, prob: Tensor, *out: Tensor) -> None:
    quantize_row_fold(_swiglu(gate, up, prob), *out)


def _swiglu_bwd(dh: Tensor, gate: Tensor, up: Tensor, prob: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    g, u, d = gate.float(), up.float(), dh.float()
    sig = torch.sigmoid(g)
    silu = g * sig
    dprob = (d * silu * u).sum(-1)
    d = d * prob[:, None]
    return (d * u * (sig + silu * (1 - sig))).bfloat16(), (d * silu).bfloat16(), dprob


def swiglu_bwd_row(dh: Tensor, gate: Tensor, up: Tensor, prob: Tensor, *out: Tensor) -> None:
    dgate, dup, dprob = _swiglu_bwd(dh, gate, up, prob)
    quantize_row(dgate, *out[:2])
    quantize_row(dup, *out[2:4])
    out[4].copy_(dprob)


def swiglu_bwd_both(dh: Tensor, gate: Tensor, up: Tensor, prob: Tensor, *out: Tensor) -> None:
    dgate, dup, dprob = _swiglu_bwd(dh, gate, up, prob)
    quantize_both(dgate, *out[:4])
    quantize_both(dup, *out[4:8])
    out[8].copy_(dprob)


def swiglu_bwd_all(dh: Tensor, gate: Tensor, up: Tensor, prob: Tensor, *out: Tensor) -> None:
    swiglu_bwd_both(dh, gate, up, prob, *out[:8], out[10])
    quantize_col(_swiglu(gate, up, prob), *out[8:10])


def swiglu_bwd_fold(dh: Tensor, gate: Tensor, up: Tensor, prob: Tensor, group_ends: Tensor, *out: Tensor) -> None:
    dgate, dup, dprob = _swiglu_bwd(dh, gate, up, prob)
    quantize_both_fold(dgate, group_ends, *out[:4], headroom=GRADIENT_HEADROOM)
    quantize_both_fold(dup, group_ends, *out[4:8], headroom=GRADIENT_HEADROOM)
    _fold_columns(_swiglu(gate, up, prob), group_ends, *out[8:10])
    out[10].copy_(dprob)


def combine(rows: Tensor, slots: Tensor, probs: Tensor, y: Tensor) -> None:
    y.copy_((rows[slots.long()].float() * probs[..., None]).sum(1))


def combine_bwd(dy: Tensor, rows: Tensor, slots: Tensor, order: Tensor, probs: Tensor, *out: Tensor) -> None:
    drows, dprobs = out
    drows.copy_(probs.flatten()[order.long()][:, None] * dy[order.long() // slots.shape[1]].float())
    dprobs.copy_((rows[slots.long()].float() * dy[:, None].float()).sum(-1))


def combine_bwd_row(
    dy: Tensor, rows: Tensor, slots: Tensor, order: Tensor, probs: Tensor, q: Tensor, sf: Tensor, dprobs: Tensor
) -> None:
    drows = torch.empty_like(rows)
    combine_bwd(dy, rows, slots, order, probs, drows, dprobs)
    quantize_row(drows, q, sf)
