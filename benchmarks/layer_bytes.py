"""Bytes of one step of the MoE layer, as functions of its shape: moved by each kernel, and saved by the forward.

Recipe `mxfp8`, folded, `prob_in="swiglu"`, bf16 parameters, weights quantized in every step, one device. An array
counts once where a kernel reads or writes it, and what a kernel measures before counts once more: the first 256 columns
of swiglu_bwd_fold, the first 256 rows and columns of quantize_matrix_fold. Rows and columns that they fold twice do not
count. Scratch memory does not count. T tokens, R = T k rows, P rows of padded groups, E
experts, D dim, F hidden dim.
"""

from typing import Literal, NamedTuple

from mxep.core_kernels.formats import BLOCK, SPAN, spans
from mxep.core_kernels.routing.plan import padded_rows

from .cases.shapes import MoELayer

BYTES_PER_S, FLOPS_PER_S = 4.0e12, 1.4e15
"""The floor: what copies and products reach on an H200."""
How = Literal["plain", "mxfp8", "recompute"]


class Pass(NamedTuple):
    """A kernel of the step. operands: inputs -> outputs. again: the part of `nbytes` that the kernel
    reads for the second time."""

    backward: bool
    op: str
    operands: str
    nbytes: int
    flops: int = 0
    again: int = 0

    @property
    def floor_us(self) -> float:
        return max(self.nbytes / BYTES_PER_S, self.flops / FLOPS_PER_S) * 1e6


def passes(shape: MoELayer, gathered: bool = False) -> list[Pass]:
    """All kernels that read or write rows or weights, in order; without the router's products with x and the maps of
    rows. gathered: parameters are freed after the forward, as FSDP2's are, and the backward quantizes them again."""
    t, d, f, e, _ = shape
    p, ends, found = padded_rows(t * shape.top_k, e, BLOCK), 4 * e, []
    tokens, chunks = 2 * t * d, spans(p, e)
    rows, hidden, weight, product = p * d, p * f, e * d * f, 2 * shape.tokens * shape.top_k * d * f
    row_d, row_f, along_d, along_f = rows + p, hidden + p, rows + chunks * d, hidden + chunks * f

    def mx(values: int) -> int:
        return values + values // BLOCK

    def add(backward: bool, op: str, operands: str, nbytes: int, products: int = 0, again: int = 0) -> None:
        found.append(Pass(backward, op, operands, nbytes + again, products * product, again))

    add(False, "quantize_row_packed", "x -> MX", tokens + mx(t * d))
    add(False, "permute_mx_fold", "MX x -> folded rows", mx(t * d) + 4 * p + ends + row_d)
    sizes = {"w1": (f, d), "w3": (f, d), "w2": (d, f)}

    def add_along_n(*names: str) -> None:
        for name in names if gathered else ():
            add(True, "quantize_matrix_fold_t", f"{name} -> along N", 3 * weight + e * sizes[name][1])

    for name, (n, k) in sizes.items():
        if gathered:
            add(False, "quantize_row_fold", f"{name} -> along K", 3 * weight + e * n)
            continue
        first = weight - e * max(n - SPAN, 0) * max(k - SPAN, 0)
        operands = f"{name} -> along both dims; first 256 rows and columns again"
        add(False, "quantize_matrix_fold", operands, 4 * weight + e * (n + k), again=2 * first)
    own = 2 * (weight + e * f + 2 * hidden)  # not shared by the two GEMMs
    add(False, "grouped_mm_fold_pair", "rows, w1, w3 -> gate, up", row_d + ends + own, 2)
    add(False, "swiglu_row_fold", "gate, up, weights -> folded h", 4 * hidden + 4 * p + ends + row_f)
    add(False, "grouped_mm_fold", "h, w2 -> out", row_f + weight + e * d + ends + 2 * rows, 1)
    add(False, "combine", "out -> y", 2 * rows + 4 * t * shape.top_k + tokens)
    add(True, "quantize_row_packed", "dy -> MX", tokens + mx(t * d))
    add(True, "permute_mx_fold", "MX dy -> folded dout", mx(t * d) + 4 * p + ends + row_d)
    add(True, "permute_mx_col_fold", "MX dy -> dout along tokens", mx(t * d) + 4 * p + ends + along_d)
    add_along_n("w2")
    add(True, "grouped_mm_fold", "dout, w2 -> dh", row_d + weight + e * f + ends + 2 * hidden, 1)
    add(
        True,
        "swiglu_bwd_fold",
        "dh, gate, up, weights -> folded dgate, dup, both ways, h along tokens; first 256 columns again",
        6 * hidden + 8 * p + ends + 2 * row_f + 3 * along_f,
        again=6 * p * min(f, SPAN),
    )
    add_along_n("w1", "w3")
    add(
        True,
        "grouped_mm_fold_sum",
        "dgate, w1, dup, w3 -> dx of rows",
        2 * (row_f + weight + e * d) + ends + 2 * rows,
        2,
    )
    add(True, "grouped_wgrad_fold", "dout, h -> dw2", along_d + along_f + ends + 2 * weight, 1)
    add(True, "permute_mx_col_fold", "MX x -> rows along tokens", mx(t * d) + 4 * p + ends + along_d)
    own = 2 * (along_f + 2 * weight)
    add(True, "grouped_wgrad_fold_pair", "dgate, dup, rows -> dw1, dw3", along_d + ends + own, 2)
    add(True, "combine", "dx of rows -> dx", 2 * rows + 4 * t * shape.top_k + tokens)
    add(True, "logits_bwd", "dlogits, router, dx -> dx", 4 * t * e + 2 * e * d + 2 * tokens)
    return found


def bytes_per_weight(shape: MoELayer, gathered: bool = False) -> float:
    """What quantizing the experts' weights reads and writes, by weight.

    >>> round(bytes_per_weight(MoELayer(4096, 2048, 768, 128, 8)), 1)
    4.8
    """
    moved = sum(p.nbytes for p in passes(shape, gathered) if p.operands.startswith(("w1 ->", "w3 ->", "w2 ->")))
    return moved / (3 * shape.num_experts * shape.dim * shape.hidden_dim)


def saved_nbytes(shape: MoELayer, how: How) -> tuple[int, int]:
    """The tensors that the forward saves for the backward: activations, x among them, and quantized weights.

    plain: the plain torch layer in bf16, with a compiled SwiGLU. recompute: `MoE(recompute=True)`.
    """
    t, d, f, e, k = shape
    r, p, x = t * k, padded_rows(t * k, e, BLOCK), 2 * t * d
    if how == "plain":
        # scores and their sums over the chosen; 32 bytes of indices and weights per row; rows of x, gate, up and h; the
        # experts' outputs in bf16 and in fp32
        maps = 4 * t * e + 32 * r + 4 * t + 4 * e
        return x + maps + r * (2 * d + 6 * f + 6 * d), 0
    maps = 4 * t * e + 8 * r + 8 * p + 8 * e
    tokens, weights = t * d + t * d // BLOCK, 3 * e * d * f + e * (2 * d + f)
    return (x + maps + tokens, 0) if how == "recompute" else (x + maps + tokens + 4 * p * f, weights)
