"""The peers: what a user would write in PyTorch and give to `torch.compile`. Same bytes as the kernels.

Each formula writes into outputs that exist already, as the kernels do; the compiler fuses those copies.
"""

import torch
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
    torch._dynamo.graph_break()  # inductor 2.13 fails to split loops that reduce along both dims
    quantize_col(x, q_t, sf_t)


def dequantize(q: Tensor, sf: Tensor, x: Tensor) -> None:
    exponent = sf.int()
    scale = torch.where(exponent == 0, 0x400000, exponent << 23).view(torch.float32)
    scale = torch.where(exponent == 255, float("nan"), scale)
    blocks = q.view(torch.float8_e4m3fn).float().unflatten(-1, (-1, 32))
    x.copy_((blocks * scale.unsqueeze(-1)).flatten(-2))


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
    inverse[sorted_] = torch.arange(len(ids), dtype=torch.int32)
    counts.copy_((ids[:, None] == torch.arange(len(counts))).sum(0))  # bincount would break the graph
