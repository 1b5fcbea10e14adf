"""The gradients of SwiGLU and h, folded in the pass that computes them: every operand of a backward from one read.

    dh, gate, up (M, F), prob (M,), group_ends (G,)
      --swiglu_bwd_fold--> dgate_qf (M, F), dgate_row_sf (M,)       operand of dx = dgate w1 + dup w3; the same of dup
                           dgate_qf_t (F, M), dgate_span_sf (S, F)  operand of dw1 = dgate^T x; the same of dup
                           h_qf_t (F, M), h_span_sf (S, F)          operand of dw2 = dout^T h
                           dprob (M,)

The scale of a column is known after 256 rows of its group, while CTAs still hold them: codes along the tokens are
written folded. Rows of dgate and dup have a headroom of 2, a factor of 4, over their first 256 values, which are
computed twice. A row with a larger block elsewhere is folded once more, in place. The CUDA kernel moves 11 bytes per
value, and scales; in such a row 2 or 4 more:

    dh, gate, up --> dgate, dup, each: qf along rows    dgate, dup, h, each: qf along the tokens
      read 6                           write 2                               write 3

The separate ops move 21, and the block scales:

    dh, gate, up --swiglu_bwd_all--> dgate, dup, each: q    --fold_rows----> qf           read 2, write 2
      read 6, write 5                dgate, dup, h: q_t     --fold_groups--> qf_t         read 3, write 3

Results are bitwise equal to the separate ops, dprob too where both are CUDA C++: which of them run depends on the
shape. An end that is no multiple of 32 has the effect that it has in `fold_groups`. There is no Triton kernel: where
neither CUDA C++ nor C++ runs, the op is composed of them.
"""

from collections.abc import Callable
from typing import Any

from ...fold.plan import fold_groups, fold_rows
from ...formats import BLOCK, GRADIENT_HEADROOM, Rounding, scale_attrs, spans
from ...launch import ArrayType, Call, KernelOp, Signature, Tiling, require_dtype, require_multiple, require_rank
from ...quantize.plan import SCALES, whole_row_types
from ...tiles import cdiv
from ..activation import swiglu_attrs
from ..plan import NUMBERS, UP_PROB, check_arrays, swiglu_bwd_all

TILE_COLUMNS = 64
"""Columns of a tile of the CUDA kernel. A CTA walks down the tokens of a group in them, so that it has the running
maxima of their scales."""
MAX_GROUPS = 1024
"""Groups whose order a CTA of the CUDA kernel keeps."""
FEW_CHAINS = 128
"""Groups times tiles of a row, the chains of spans that the 132 multiprocessors of an H100 or H200 share. With fewer
some have nothing to do, and above MANY_TOKENS the separate ops are faster."""
MANY_TOKENS = 8192
LONGEST_ROW = 48896
"""Values of a row whose block scales fit in shared memory, for 16 rows of dgate and dup, next to 256 bytes of sums."""


def scratch_words(m: int, f: int) -> int:
    """Words of the scratch memory of the CUDA kernel: the block scales of the rows of dgate and dup, two blocks each of
    a tile; a part of dprob for each block; and the least scales of the rows.

    >>> scratch_words(256, 96)  # two tiles, three blocks
    1408
    """
    return m * cdiv(f, TILE_COLUMNS) + m * (f // BLOCK) + m // 2


def _check(
    dh: ArrayType, gate: ArrayType, up: ArrayType, prob: ArrayType, group_ends: ArrayType, *,
    rounding: Rounding = Rounding.RCEIL, satfinite: bool = False, alpha: float = 1.0, limit: float = 0.0,
    offset: float = 0.0,
) -> Signature:  # fmt: skip
    op = "swiglu_bwd_fold"
    m, f = shape = check_arrays(op, {"dh": dh, "gate": gate, "up": up}, prob)
    require_dtype(op, "group_ends", group_ends, "int32")
    require_rank(op, "group_ends", group_ends, 1)
    require_multiple(op, "gate", m, BLOCK, "dim 0", "pad the groups, see `row_map`")
    require_multiple(op, "gate", f, BLOCK, "last dim")
    rows = whole_row_types(op, "gate", shape)
    tokens = ArrayType((f, m), "uint8"), ArrayType((spans(m, group_ends.shape[0]), f), "uint8")
    attrs = scale_attrs(op, rounding, satfinite) | swiglu_attrs(op, alpha, limit, offset)
    return Signature((*rows, *tokens, *rows, *tokens, *tokens, prob), attrs, tokens=(m, BLOCK))


def _tile(call: Call, arch: str) -> Tiling:  # the same on every architecture
    (m, f), groups = call.inputs[0].shape, call.inputs[-1].shape[0]
    unsupported = ""
    if groups > MAX_GROUPS:
        unsupported = f"allowed: at most {MAX_GROUPS} groups"
    elif f > LONGEST_ROW:
        unsupported = f"allowed: rows of at most {LONGEST_ROW} values"
    elif m > MANY_TOKENS and groups * cdiv(f, TILE_COLUMNS) < FEW_CHAINS:
        unsupported = f"allowed: at least {FEW_CHAINS} tiles of {TILE_COLUMNS} columns in all groups; a CTA has one"
    return Tiling(scratch=(ArrayType((scratch_words(m, f),), "int32"),), cuda_unsupported=unsupported)


def _compose(
    call: Callable[..., tuple[Any, ...]], dh: Any, gate: Any, up: Any, prob: Any, group_ends: Any, **options: Any
) -> tuple[Any, ...]:
    *gradients, h_q_t, h_sf_t, dprob = call(swiglu_bwd_all, dh, gate, up, prob, **options)
    folded = []
    for q, sf, q_t, sf_t in (gradients[:4], gradients[4:]):
        rows = call(fold_rows, q, sf, group_ends, headroom=GRADIENT_HEADROOM)
        folded += [*rows, *call(fold_groups, q_t, sf_t, group_ends)]
    return *folded, *call(fold_groups, h_q_t, h_sf_t, group_ends), dprob


swiglu_bwd_fold = KernelOp(
    "swiglu_bwd_fold",
    f"""`swiglu_bwd_all`, and `fold_rows` of its rows, with headroom 2, and `fold_groups` of its columns, in one read of
    the arrays.

    Args:
        dh: (M, F) bf16. M and F are multiples of 32, F positive.
        gate: (M, F) bf16.
        {UP_PROB}
        group_ends: (G,) int32, where each group ends along M: non-decreasing multiples of 32.
        {SCALES}
        {NUMBERS}

    Returns:
        dgate_qf (M, F), dgate_row_sf (M,), dgate_qf_t (F, M), dgate_span_sf (M // 256 + G, F); of dup the same dup_qf,
        dup_row_sf, dup_qf_t, dup_span_sf; h_qf_t (F, M), h_span_sf (M // 256 + G, F); all uint8. dprob (M,) fp32, or
        (0,). Rows past the last end, and such columns of the transposed results, are unspecified; of dprob they are
        zeros if dh, gate and up are.

    Raises:
        ValueError: shape, rounding, on a CPU also the ends.
        TypeError: dtype.

    Example:
        >>> one, ends = xp.ones((32, 32), dtype=xp.bfloat16), xp.asarray([32], dtype=xp.int32)
        >>> *_, dup_qf, dup_row_sf, dup_qf_t, dup_span_sf, h_qf_t, h_span_sf, _ = ops.swiglu_bwd_fold(
        ...     one, one, one, xp.zeros((0,)), ends
        ... )
        >>> dup_qf[0, 0].item(), dup_row_sf[0].item()  # 0.75 = 384 * 2^-9, under two octaves more 96 * 2^-7
        (108, 120)
        >>> h_qf_t[0, 0].item(), h_span_sf[0, 0].item()  # the same under three octaves more: 48 * 2^-6
        (100, 121)
    """,
    ("dh", "gate", "up", "prob", "group_ends"),
    (
        *(f"{name}_{part}" for name in ("dgate", "dup") for part in ("qf", "row_sf", "qf_t", "span_sf")),
        *("h_qf_t", "h_span_sf", "dprob"),
    ),
    _check,
    _tile,
    compose=_compose,
)
