"""Cases of the family `fold`: quantize, then rescale to one scale per row, or per feature and 256 tokens."""

from collections.abc import Iterator

import torch
from mxep.core_kernels.fold.both import plan as plan_both
from mxep.core_kernels.fold.gathered import plan_requantize
from mxep.core_kernels.fold.matrix import plan as plan_matrix
from mxep.core_kernels.formats import BLOCK, SPAN, spans

from ..case import Call, Case, Tensors, one, rows_part, values
from ..shapes import Layer

OPS = ("quantize_row_fold", "quantize_both_fold", "requantize_col_fold", "quantize_matrix_fold")


def group_part(inputs: Tensors, outputs: Tensors, at: slice) -> tuple[Tensors, Tensors]:
    """One of several equal groups: the scale of a chunk of 256 tokens depends on the earlier chunks of its group."""
    (*rows, group_ends), (*row_operand, qf_t, chunk_sf) = inputs, outputs
    length = at.stop - at.start
    slot = at.start // SPAN + at.start // length
    slots = slice(slot, slot + spans(length, 1))
    return (*(x[at] for x in rows), group_ends[:1]), (*(x[at] for x in row_operand), qf_t[:, at], chunk_sf[slots])


def cases(layer: Layer, call: Call, device: str) -> Iterator[Case]:
    m, k, g = layer.tokens, layer.dim, layer.local_experts
    x, shape = values(m, k, device=device), {"M": m, "K": k}
    op = "quantize_row_fold"
    yield Case(op, shape, (x,), one(op), rows_part, m, formula=op)
    op, length = "quantize_both_fold", m // g // BLOCK * BLOCK
    ends = length * torch.arange(1, g + 1, dtype=torch.int32, device=device)
    yield Case(op, {**shape, "G": g}, (x, ends), one(op), group_part, g * length, length, op,
               scratch=plan_both.scratch_bytes(m, k, g, "bfloat16"))  # fmt: skip
    op, mx = "requantize_col_fold", call("quantize_row", x)
    yield Case(op, {**shape, "G": g}, (*mx, ends), one(op), group_part, g * length, length, op,
               scratch=plan_requantize.scratch_bytes(m, k, g))  # fmt: skip
    del x, mx
    op, n = "quantize_matrix_fold", layer.hiddens[0]
    yield Case(op, {"G": g, "N": n, "K": k}, (values(g, n, k, device=device),), one(op), rows_part, g, slice_=1,
               formula=op, scratch=4 * plan_matrix.scratch_words(g, n, k))  # fmt: skip
