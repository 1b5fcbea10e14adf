"""Every kernel as a function on jax arrays: no gradients here (vjp.py has them), plain bytes in and out.

    quantize_row   quantize_row_packed   quantize_col   quantize_both   dequantize
    permute_rows   permute_mx            sort_by_expert row_map
    fold_rows      quantize_row_fold     fold_groups
    quantize_both_fold                   quantize_rowwise               count_fold_loss
    block_scales   unblock_scales        combine        combine_bwd
    swiglu         swiglu_row            swiglu_col
    swiglu_bwd     swiglu_bwd_row        swiglu_bwd_col swiglu_bwd_both
    grouped_mm_mx  grouped_mm_bf16       grouped_wgrad_mx               grouped_wgrad_bf16
    grouped_mm_fold                      grouped_wgrad_fold             grouped_wgrad_bf16_t
    grouped_mm_fold_bias

E4M3 data (`q`) and E8M0 scales (`sf`) are uint8. All functions are pure, trace under jit, shard_map and
remat, and raise ValueError (shape, value) or TypeError (dtype) while tracing. Formats: OCP Microscaling
Formats v1.0. In a jit that shards its arrays without shard_map, XLA gathers a kernel's inputs first.

`jax.export.export` must be told of the kernels, which are custom calls ("mxep.cuda." on a GPU), and what is serialized
has taken its checks of values out by `checkify.checkify` first:

    kernels = [jax.export.DisabledSafetyCheck.custom_call(f"mxep.{op}") for op in ops.OPS]
    jax.export.export(jax.jit(f), disabled_checks=kernels)(x)
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp  # noqa: F401

from ..core_kernels.combine import plan as combine_ops
from ..core_kernels.fold import plan as fold
from ..core_kernels.fold import plan_both as both_fold
from ..core_kernels.fold import plan_loss as fold_loss_kernels
from ..core_kernels.formats import BLOCK, Rounding
from ..core_kernels.grouped_gemm import plan as grouped_gemm
from ..core_kernels.grouped_gemm import plan_folded as folded_gemm
from ..core_kernels.launch import KernelOp
from ..core_kernels.permute import plan as permute
from ..core_kernels.quantize import plan as quantize
from ..core_kernels.routing import plan as routing
from ..core_kernels.scale_layout import plan as scale_layout
from ..core_kernels.swiglu import plan as swiglu_kernels
from ._call import call

OPS: dict[str, KernelOp] = {
    op.name: op
    for module in (
        *(quantize, permute, routing, fold, both_fold, scale_layout),
        *(fold_loss_kernels, combine_ops, swiglu_kernels, grouped_gemm, folded_gemm),
    )
    for op in vars(module).values()
    if isinstance(op, KernelOp)
}


class RowMap(NamedTuple):
    """Where padded expert-major rows come from; what `permute_*` follows and `unpermute_*` reverses.

    row_map (P,) int32: padded row i is received row row_map[i], -1 for padding.
    inverse (R,) int32: received row j is padded row inverse[j], -1 where no token was received.
    padded_counts (G,), group_ends (G,) int32: rows of each local expert with padding, and where they end.
    """

    row_map: jax.Array
    inverse: jax.Array
    padded_counts: jax.Array
    group_ends: jax.Array


class ExpertOrder(NamedTuple):
    """order (T,): slots grouped by expert, stable; inverse (T,): where each slot went; counts (E,); int32."""

    order: jax.Array
    inverse: jax.Array
    counts: jax.Array


def quantize_row(
    x: jax.Array, *, rounding: Rounding | str = Rounding.RCEIL, satfinite: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Quantize along the last dim: x (..., M, K) bf16 or fp32 -> q (..., M, K), sf (..., M, K/32), uint8.

    >>> q, sf = quantize_row(jnp.full((1, 32), 448.0, jnp.bfloat16))
    >>> int(q[0, 0]), int(sf[0, 0])  # 448 is E4M3's largest value, 127 means 2^0
    (126, 127)

    Raises ValueError if K is no multiple of 32, TypeError for another dtype. Source: MX v1.0, section 6.3.
    """
    q, sf = call(quantize.quantize_row, x, rounding=rounding, satfinite=satfinite)
    return q, sf


def quantize_row_packed(
    x: jax.Array, *, rounding: Rounding | str = Rounding.RCEIL, satfinite: bool = False
) -> jax.Array:
    """As `quantize_row`, as one wire row per token: x (M, K) -> [q | sf] (M, K + K/32) uint8."""
    return call(quantize.quantize_row_packed, x, rounding=rounding, satfinite=satfinite)[0]


def quantize_col(
    x: jax.Array, *, rounding: Rounding | str = Rounding.RCEIL, satfinite: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Quantize along dim -2, written transposed: x (..., M, K) -> q (..., K, M), sf (..., K, M/32), uint8.

    Raises ValueError if M is no multiple of 32, TypeError unless x is bf16 or fp32.
    """
    q_t, sf_t = call(quantize.quantize_col, x, rounding=rounding, satfinite=satfinite)
    return q_t, sf_t


def quantize_both(
    x: jax.Array, *, rounding: Rounding | str = Rounding.RCEIL, satfinite: bool = False
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """`quantize_row` and `quantize_col` in one read of x: -> q, sf, q_t, sf_t."""
    q, sf, q_t, sf_t = call(quantize.quantize_both, x, rounding=rounding, satfinite=satfinite)
    return q, sf, q_t, sf_t


def dequantize(q: jax.Array, sf: jax.Array, *, out_dtype: jax.typing.DTypeLike = "bfloat16") -> jax.Array:
    """q (..., M, K), sf (..., M, K/32) uint8 -> x (..., M, K) bf16 or fp32; exact in fp32."""
    return call(quantize.dequantize, q, sf, out_dtype=out_dtype)[0]


def permute_rows(x: jax.Array, row_map: jax.Array) -> jax.Array:
    """x (R, D) bf16, fp32 or uint8, row_map (P,) int32 -> (P, D): row i is x[row_map[i]], zeros for -1."""
    return call(permute.permute_rows, x, row_map)[0]


def permute_mx(packed: jax.Array, row_map: jax.Array) -> tuple[jax.Array, jax.Array]:
    """packed (R, K + K/32) uint8, row_map (P,) int32 -> q (P, K), sf (P, K/32): gathers and splits wire rows."""
    q, sf = call(permute.permute_mx, packed, row_map)
    return q, sf


def sort_by_expert(expert_ids: jax.Array, num_experts: int) -> ExpertOrder:
    """expert_ids (T,) int32 in [0, num_experts) -> stable order, its inverse, tokens per expert.

    >>> sort_by_expert(jnp.array([1, 0, 1], jnp.int32), 2).order.tolist()
    [1, 0, 2]
    """
    return ExpertOrder(*call(routing.sort_by_expert, expert_ids, num_experts=num_experts))


def row_map(
    counts: jax.Array, *, num_rows: int, num_local_experts: int, alignment: int = BLOCK, rank_rows: int = 0
) -> RowMap:
    """From rank-major received rows to padded expert-major rows.

    counts: (ranks * num_local_experts,) int32, rows received per rank and local expert.
    num_rows: rows of the receive buffer; rank_rows: rows of every rank's part of it, 0 if the parts follow
        each other without slack. alignment: rows each group is padded to.

    >>> row_map(jnp.array([2, 1], jnp.int32), num_rows=3, num_local_experts=2).group_ends.tolist()
    [32, 64]
    """
    outputs = call(
        routing.row_map,
        counts,
        num_rows=num_rows,
        num_local_experts=num_local_experts,
        alignment=alignment,
        rank_rows=rank_rows,
    )
    return RowMap(*outputs)


def fold_rows(q: jax.Array, sf: jax.Array) -> tuple[jax.Array, jax.Array]:
    """q (..., M, K), sf (..., M, K/32) uint8 -> qf (..., M, K), row_sf (..., M): the row's largest scale for all.

    A NaN block (scale byte 255) has no say in row_sf and becomes elements 0x7F; a row of NaN blocks has 255.
    """
    qf, row_sf = call(fold.fold_rows, q, sf)
    return qf, row_sf


def quantize_row_fold(
    x: jax.Array, *, rounding: Rounding | str = Rounding.RCEIL, satfinite: bool = False
) -> tuple[jax.Array, jax.Array]:
    """`quantize_row` and `fold_rows` in one read of x: (..., M, K) -> qf (..., M, K), row_sf (..., M)."""
    qf, row_sf = call(fold.quantize_row_fold, x, rounding=rounding, satfinite=satfinite)
    return qf, row_sf


def quantize_rowwise(
    x: jax.Array, *, rounding: Rounding | str = Rounding.RCEIL, satfinite: bool = False
) -> tuple[jax.Array, jax.Array]:
    """One scale per row: x (..., M, K) bf16 or fp32 -> qf (..., M, K), row_sf (..., M), uint8.

    >>> qf, row_sf = quantize_rowwise(jnp.full((1, 64), 448.0, jnp.bfloat16).at[0, 0].set(896))
    >>> qf[0, :2].tolist(), row_sf.tolist()  # 448 and 224 under 2^1
    ([126, 118], [128])

    A NaN or an infinity in a row makes its scale 255 and all its elements 0x7F. Raises ValueError if K is 0 or no
    multiple of 32, TypeError for another dtype.
    """
    qf, row_sf = call(quantize.quantize_rowwise, x, rounding=rounding, satfinite=satfinite)
    return qf, row_sf


def fold_groups(q: jax.Array, sf: jax.Array, group_ends: jax.Array) -> tuple[jax.Array, jax.Array]:
    """q (R, M), sf (R, M/32) uint8, group_ends (G,) int32 -> qf (R, M), span_sf (`spans(M, G)`, R), uint8.

    Groups are of columns and end at multiples of 32; core_kernels/fold/plan.py draws their spans of 256 columns. A
    row's scale in one is the largest so far in the group, with two octaves of headroom in the first. Columns past the
    last end become zeros, unused slots 0.

    >>> q, sf = jnp.full((1, 512), 0x70, jnp.uint8), jnp.repeat(jnp.uint8([100, 104]), 8)[None]
    >>> qf, span_sf = fold_groups(q, sf, jnp.array([512], jnp.int32))
    >>> span_sf[:, 0].tolist(), qf[0, ::256].tolist()  # 128 becomes 32 under 2^2, and stays what it is
    ([102, 104, 0], [96, 112])

    Raises ValueError for shapes that do not fit, TypeError for other dtypes.
    """
    qf, span_sf = call(fold.fold_groups, q, sf, group_ends)
    return qf, span_sf


def quantize_both_fold(
    x: jax.Array, group_ends: jax.Array, *, rounding: Rounding | str = Rounding.RCEIL, satfinite: bool = False
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """`quantize_row_fold` of x, and `fold_groups` of its `quantize_col`, in one read of it.

    x (M, K) bf16 or fp32, group_ends (G,) int32, multiples of 32 -> qf (M, K), row_sf (M,), qf_t (K, M),
    span_sf (`spans(M, G)`, K), uint8. Columns of qf_t past the last end are zeros.

    >>> x = jnp.ones((32, 64)).at[0].set(4.0)
    >>> qf, row_sf, qf_t, span_sf = quantize_both_fold(x, jnp.array([32], jnp.int32))
    >>> row_sf[:2].tolist(), span_sf[:, 0].tolist()  # 4 = 2^8 * 2^-6, and 127 - 6 = 121, and two octaves
    ([121, 119], [123])

    Raises ValueError unless M and K are multiples of 32 and K is not 0, TypeError for other dtypes.
    """
    options = {"rounding": rounding, "satfinite": satfinite}
    qf, row_sf, qf_t, span_sf = call(both_fold.quantize_both_fold, x, group_ends, **options)
    return qf, row_sf, qf_t, span_sf


def count_fold_loss(q: jax.Array, sf: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Per row, what folding each block under the scale byte `target` does to its values.

    q (..., M, K), sf, target (..., M, K/32) uint8 -> nonzero, rounded, flushed (..., M) int32: values that are not
    zero, those of them that change in E4M3's subnormals, and those that become zero. A NaN counts nowhere, nor does a
    block whose sf or target is 255; a target below a block's scale takes nothing.

    >>> q, target = jnp.full((3, 32), 0x39, jnp.uint8), jnp.full((3, 1), 127, jnp.uint8)  # 1.125, and 2^0
    >>> sf = jnp.uint8([[121], [120], [111]])  # 1.125 * 2^-6 is 9 * 2^-9, an octave below are 4.5 * 2^-9
    >>> [count.tolist() for count in count_fold_loss(q, sf, target)]
    [[32, 32, 32], [0, 32, 0], [0, 0, 32]]

    Raises ValueError for shapes that do not fit, TypeError for other dtypes.
    """
    nonzero, rounded, flushed = call(fold_loss_kernels.count_fold_loss, q, sf, target)
    return nonzero, rounded, flushed


def block_scales(sf: jax.Array, group_ends: jax.Array) -> jax.Array:
    """sf (M, S) uint8, group_ends (G,) int32 -> (P, S4): tiles of 128 x 4 in 512 bytes: see scale_layout/plan.py.

    P = M + 127 * G rounded down to 128, S4 = S rounded up to 4. Every group starts a tile; padding is 0.
    """
    return call(scale_layout.block_scales, sf, group_ends)[0]


def unblock_scales(blocked: jax.Array, group_ends: jax.Array, *, num_rows: int, num_scales: int) -> jax.Array:
    """The inverse of `block_scales`: -> sf (num_rows, num_scales); rows past group_ends[-1] are zeros."""
    return call(scale_layout.unblock_scales, blocked, group_ends, num_rows=num_rows, num_scales=num_scales)[0]


def combine(
    rows: jax.Array, slots: jax.Array, probs: jax.Array, *, out_dtype: jax.typing.DTypeLike = "bfloat16"
) -> jax.Array:
    """rows (R, D) bf16 or fp32, slots (T, K) int32, probs (T, K) fp32 -> (T, D): each token's weighted rows, summed.

    y[t] = sum over k of probs[t, k] * rows[slots[t, k]] in fp32, k ascending, rounded once; a slot of -1 adds
    nothing. probs of shape (0,): the unweighted sum.

    >>> combine(jnp.ones((2, 1)), jnp.array([[1, 0]]), jnp.array([[0.25, 0.5]])).tolist()
    [[0.75]]

    Raises ValueError for shapes that do not fit, TypeError for other dtypes.
    """
    return call(combine_ops.combine, rows, slots, probs, out_dtype=out_dtype)[0]


def combine_bwd(
    dy: jax.Array, rows: jax.Array, slots: jax.Array, order: jax.Array, probs: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The gradients of `combine`: dy (T, D) bf16 or fp32 -> drows (R, D) in rows' dtype, dprobs (T, K) fp32.

    order (R,) int32: the slot t * K + k of each row, -1 for padding, whose gradient is zeros: slots' inverse.
    Without probabilities (shape (0,)) rows is not read and dprobs is (0,).
    """
    drows, dprobs = call(combine_ops.combine_bwd, dy, rows, slots, order, probs)
    return drows, dprobs


def swiglu(gate: jax.Array, up: jax.Array, prob: jax.Array) -> jax.Array:
    """silu(gate) * up * prob: gate, up (M, F) bf16, prob (M,) fp32, or (0,) for weights of one -> h (M, F) bf16.

    >>> one = jnp.ones((1, 1), jnp.bfloat16)
    >>> float(swiglu(one, one, jnp.zeros(0))[0, 0])  # sigmoid(1) = 0.7311, to 8 bits
    0.73046875

    Raises ValueError (shape) or TypeError (dtype). Source: Shazeer, "GLU Variants Improve Transformer", 2020.
    """
    return call(swiglu_kernels.swiglu, gate, up, prob)[0]


def swiglu_row(
    gate: jax.Array, up: jax.Array, prob: jax.Array,
    *, rounding: Rounding | str = Rounding.RCEIL, satfinite: bool = False,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """`quantize_row` of `swiglu`, h never stored: -> q (M, F), sf (M, F/32); F a multiple of 32."""
    options = {"rounding": rounding, "satfinite": satfinite}
    q, sf = call(swiglu_kernels.swiglu_row, gate, up, prob, **options)
    return q, sf


def swiglu_col(
    gate: jax.Array, up: jax.Array, prob: jax.Array,
    *, rounding: Rounding | str = Rounding.RCEIL, satfinite: bool = False,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """`quantize_col` of `swiglu`, h never stored: -> q (F, M), sf (F, M/32); M a multiple of 32."""
    options = {"rounding": rounding, "satfinite": satfinite}
    q_t, sf_t = call(swiglu_kernels.swiglu_col, gate, up, prob, **options)
    return q_t, sf_t


def swiglu_bwd(
    dh: jax.Array, gate: jax.Array, up: jax.Array, prob: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradient of `swiglu`: dh (M, F) bf16 -> dgate, dup (M, F) bf16, dprob (M,) fp32, or (0,)."""
    dgate, dup, dprob = call(swiglu_kernels.swiglu_bwd, dh, gate, up, prob)
    return dgate, dup, dprob


def swiglu_bwd_row(
    dh: jax.Array, gate: jax.Array, up: jax.Array, prob: jax.Array,
    *, rounding: Rounding | str = Rounding.RCEIL, satfinite: bool = False,
) -> tuple[jax.Array, ...]:  # fmt: skip
    """`swiglu_bwd` with `quantize_row` of dgate and of dup: -> q, sf of dgate, q, sf of dup, dprob."""
    options = {"rounding": rounding, "satfinite": satfinite}
    return call(swiglu_kernels.swiglu_bwd_row, dh, gate, up, prob, **options)


def swiglu_bwd_col(
    dh: jax.Array, gate: jax.Array, up: jax.Array, prob: jax.Array,
    *, rounding: Rounding | str = Rounding.RCEIL, satfinite: bool = False,
) -> tuple[jax.Array, ...]:  # fmt: skip
    """`swiglu_bwd` with `quantize_col` of dgate and of dup: -> q_t, sf_t of dgate, q_t, sf_t of dup, dprob."""
    options = {"rounding": rounding, "satfinite": satfinite}
    return call(swiglu_kernels.swiglu_bwd_col, dh, gate, up, prob, **options)


def swiglu_bwd_both(
    dh: jax.Array, gate: jax.Array, up: jax.Array, prob: jax.Array,
    *, rounding: Rounding | str = Rounding.RCEIL, satfinite: bool = False,
) -> tuple[jax.Array, ...]:  # fmt: skip
    """`swiglu_bwd` with `quantize_both` of dgate and of dup: -> q, sf, q_t, sf_t of dgate, then of dup, dprob."""
    options = {"rounding": rounding, "satfinite": satfinite}
    return call(swiglu_kernels.swiglu_bwd_both, dh, gate, up, prob, **options)


def grouped_mm_mx(
    lhs_q: jax.Array, lhs_sf: jax.Array, rhs_q: jax.Array, rhs_sf: jax.Array, group_ends: jax.Array,
    *, out_dtype: jax.typing.DTypeLike = "bfloat16",
) -> jax.Array:  # fmt: skip
    """lhs (M, K) x rhs_t (G, N, K), both MXFP8 along K -> (M, N); rows past group_ends[-1] are zeros."""
    return call(grouped_gemm.grouped_mm_mx, lhs_q, lhs_sf, rhs_q, rhs_sf, group_ends, out_dtype=out_dtype)[0]


def grouped_mm_bf16(
    lhs: jax.Array, rhs_t: jax.Array, group_ends: jax.Array, *, out_dtype: jax.typing.DTypeLike = "bfloat16"
) -> jax.Array:
    """lhs (M, K) x rhs_t (G, N, K), both bf16 -> (M, N), accumulated in fp32."""
    return call(grouped_gemm.grouped_mm_bf16, lhs, rhs_t, group_ends, out_dtype=out_dtype)[0]


def grouped_wgrad_mx(
    lhs_q: jax.Array, lhs_sf: jax.Array, rhs_q: jax.Array, rhs_sf: jax.Array, group_ends: jax.Array,
    *, out_dtype: jax.typing.DTypeLike = "bfloat16",
) -> jax.Array:  # fmt: skip
    """lhs_t (N, M) x rhs_t (K, M), both MXFP8 along M -> (G, N, K); zeros for an empty group."""
    return call(grouped_gemm.grouped_wgrad_mx, lhs_q, lhs_sf, rhs_q, rhs_sf, group_ends, out_dtype=out_dtype)[0]


def grouped_wgrad_bf16(
    lhs: jax.Array, rhs: jax.Array, group_ends: jax.Array, *, out_dtype: jax.typing.DTypeLike = "bfloat16"
) -> jax.Array:
    """lhs (M, N) x rhs (M, K), both bf16 -> (G, N, K): lhs.T @ rhs of each group, accumulated in fp32."""
    return call(grouped_gemm.grouped_wgrad_bf16, lhs, rhs, group_ends, out_dtype=out_dtype)[0]


def grouped_wgrad_bf16_t(
    lhs_t: jax.Array, rhs_t: jax.Array, group_ends: jax.Array, *, out_dtype: jax.typing.DTypeLike = "bfloat16"
) -> jax.Array:
    """lhs_t (N, M) x rhs_t (K, M), both bf16 -> (G, N, K): `grouped_wgrad_bf16` of the transposed operands."""
    return call(grouped_gemm.grouped_wgrad_bf16_t, lhs_t, rhs_t, group_ends, out_dtype=out_dtype)[0]


def grouped_mm_fold(
    lhs_qf: jax.Array, lhs_sf: jax.Array, rhs_qf: jax.Array, rhs_sf: jax.Array, group_ends: jax.Array,
    *, out_dtype: jax.typing.DTypeLike = "bfloat16",
) -> jax.Array:  # fmt: skip
    """lhs (M, K), lhs_sf (M,) x rhs_t (G, N, K), rhs_sf (G, N), folded -> (M, N); zeros past group_ends[-1].

    Raises ValueError unless K is a multiple of 32 and N of 8.
    """
    return call(folded_gemm.grouped_mm_fold, lhs_qf, lhs_sf, rhs_qf, rhs_sf, group_ends, out_dtype=out_dtype)[0]


def grouped_mm_fold_bias(
    lhs_qf: jax.Array, lhs_sf: jax.Array, rhs_qf: jax.Array, rhs_sf: jax.Array, bias: jax.Array,
    group_ends: jax.Array, *, out_dtype: jax.typing.DTypeLike = "bfloat16",
) -> jax.Array:  # fmt: skip
    """`grouped_mm_fold` + bias (G, N) fp32, each group's row of it, rounded once; zeros past group_ends[-1]."""
    operands = (lhs_qf, lhs_sf, rhs_qf, rhs_sf, bias, group_ends)
    return call(folded_gemm.grouped_mm_fold_bias, *operands, out_dtype=out_dtype)[0]


def grouped_wgrad_fold(
    lhs_qf: jax.Array, lhs_sf: jax.Array, rhs_qf: jax.Array, rhs_sf: jax.Array, group_ends: jax.Array,
    *, out_dtype: jax.typing.DTypeLike = "bfloat16",
) -> jax.Array:  # fmt: skip
    """lhs_t (N, M), lhs_sf (S, N) x rhs_t (K, M), rhs_sf (S, K), as `fold_groups` made them -> (G, N, K); ends are
    multiples of 32, and an empty group gives zeros.

    Raises ValueError unless M is a multiple of 32 and K of 8.
    """
    return call(folded_gemm.grouped_wgrad_fold, lhs_qf, lhs_sf, rhs_qf, rhs_sf, group_ends, out_dtype=out_dtype)[0]
