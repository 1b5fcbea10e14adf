"""SwiGLU between the two products of an expert, forward and backward, quantized on its way out.

    gate, up (M, F)  --swiglu---------> h (M, F) bf16         h = silu(gate) * up * prob
      prob (M,)      --swiglu_row-----> quantize_row(h)       for the product with w2
                     --swiglu_col-----> quantize_col(h)       for w2's gradient
                     --swiglu_both----> both

    dh, gate, up     --swiglu_bwd-----> dgate, dup (M, F) bf16, dprob (M,) fp32
      prob           --swiglu_bwd_row-> quantize_row of each; likewise _col and _both

`prob` of shape (0,) weighs every row one. h, dgate and dup are rounded to bf16 before they are quantized, so a fused
op writes the bytes of the two ops it replaces. oracle_swiglu.py defines every byte; only the order of dprob's sum is
free. That sum needs whole rows: a backward program with `prob` walks along its rows, one without it need not.
"""

import triton
import triton.language as tl

from .formats import BLOCK, EXP2_COEFFICIENTS, LOG2E, Rounding, scale_attrs
from .launch import ArrayType, KernelOp, Launch, require_dtype, require_multiple, require_rank, require_shape
from .mx_math import BLOCK_MX, f32_to_bf16, fma, reciprocal, round_to_bf16, to_f32
from .quantize import store_quantized
from .tiles import cdiv, hw_cast, strip_tiles, tiles

MINUS_LOG2E: tl.constexpr = tl.constexpr(-LOG2E)
C1, C2, C3, C4, C5 = map(tl.constexpr, EXP2_COEFFICIENTS)
MAGIC: tl.constexpr = tl.constexpr(12583039.0)
"""1.5 * 2^23 + 127: added to a number of [-127, 0] it leaves the nearest integer plus 127 in the lowest bits."""


@triton.jit
def _sigmoid(g, HW_CAST: tl.constexpr):
    """1 / (1 + e^-g) through t = 2^(-|g| log2 e), the same bits everywhere; t below 2^-126 is 0."""
    y = tl.maximum(tl.abs(g) * MINUS_LOG2E, -127.0)
    m = y + MAGIC
    f = y - (m - MAGIC)
    p = tl.full(f.shape, C5, tl.float32)
    p = fma(p, f, tl.full(f.shape, C4, tl.float32), HW_CAST)
    p = fma(p, f, tl.full(f.shape, C3, tl.float32), HW_CAST)
    p = fma(p, f, tl.full(f.shape, C2, tl.float32), HW_CAST)
    p = fma(p, f, tl.full(f.shape, C1, tl.float32), HW_CAST)
    p = fma(p, f, tl.full(f.shape, 1.0, tl.float32), HW_CAST)
    t = p * (m.to(tl.uint32, bitcast=True) << 23).to(tl.float32, bitcast=True)
    r = reciprocal(1.0 + t, HW_CAST)
    return tl.where(g < 0, t * r, r)


@triton.jit
def _forward_tile(
    gate, up, prob, M,
    h, q, sf, q_t, sf_t,
    F: tl.constexpr, WEIGHTED: tl.constexpr, ROW: tl.constexpr, COL: tl.constexpr,
    rounding: tl.constexpr, satfinite: tl.constexpr,
    HW_CAST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One (BLOCK_M, BLOCK_K) tile of h, stored in bf16 or quantized along rows, columns or both."""
    tile = tl.program_id(0)
    k_tiles: tl.constexpr = (F + BLOCK_K - 1) // BLOCK_K
    m0, k0 = (tile // k_tiles).to(tl.int64) * BLOCK_M, (tile % k_tiles) * BLOCK_K
    m, k = m0 + tl.arange(0, BLOCK_M), k0 + tl.arange(0, BLOCK_K)
    at, inside = m[:, None] * F + k[None, :], (m < M)[:, None] & (k < F)[None, :]
    g = to_f32(tl.load(gate + at, mask=inside, other=0.0))
    u = to_f32(tl.load(up + at, mask=inside, other=0.0))
    v = (g * _sigmoid(g, HW_CAST)) * u
    if WEIGHTED:
        v = v * tl.load(prob + m, mask=m < M, other=0.0)[:, None]
    if ROW or COL:
        store_quantized(
            round_to_bf16(v, HW_CAST), m0, k0, 0, M, q, sf, q_t, sf_t, F, F, F // BLOCK_MX, ROW, COL,
            rounding, satfinite, HW_CAST, BLOCK_M, BLOCK_K,
        )  # fmt: skip
    else:
        tl.store(h + at, f32_to_bf16(v, HW_CAST), mask=inside)


@triton.jit
def _backward_strip(
    dh, gate, up, prob, M,
    dgate, dup, q, sf, q_t, sf_t, up_q, up_sf, up_q_t, up_sf_t, dprob,
    F: tl.constexpr, WEIGHTED: tl.constexpr, ROW: tl.constexpr, COL: tl.constexpr,
    rounding: tl.constexpr, satfinite: tl.constexpr,
    HW_CAST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """BLOCK_M rows of dgate and dup, tile by tile from left to right; q* hold dgate, up_q* hold dup.

    Programs along axis 1 share the tiles of a strip; with `prob` there is one, and it sums dprob on its way.
    """
    m0 = tl.program_id(0).to(tl.int64) * BLOCK_M
    m = m0 + tl.arange(0, BLOCK_M)
    total = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    if WEIGHTED:
        p = tl.load(prob + m, mask=m < M, other=0.0)[:, None]
    for k0 in range(tl.program_id(1) * BLOCK_K, F, tl.num_programs(1) * BLOCK_K):
        k = k0 + tl.arange(0, BLOCK_K)
        at, inside = m[:, None] * F + k[None, :], (m < M)[:, None] & (k < F)[None, :]
        g = to_f32(tl.load(gate + at, mask=inside, other=0.0))
        u = to_f32(tl.load(up + at, mask=inside, other=0.0))
        d = to_f32(tl.load(dh + at, mask=inside, other=0.0))
        sig = _sigmoid(g, HW_CAST)
        silu = g * sig
        if WEIGHTED:
            total += d * (silu * u)
            d = d * p
        v_gate, v_up = (d * u) * (sig + silu * (1.0 - sig)), d * silu
        if ROW or COL:
            store_quantized(
                round_to_bf16(v_gate, HW_CAST), m0, k0, 0, M, q, sf, q_t, sf_t, F, F, F // BLOCK_MX, ROW, COL,
                rounding, satfinite, HW_CAST, BLOCK_M, BLOCK_K,
            )  # fmt: skip
            store_quantized(
                round_to_bf16(v_up, HW_CAST), m0, k0, 0, M, up_q, up_sf, up_q_t, up_sf_t, F, F, F // BLOCK_MX, ROW, COL,
                rounding, satfinite, HW_CAST, BLOCK_M, BLOCK_K,
            )  # fmt: skip
        else:
            tl.store(dgate + at, f32_to_bf16(v_gate, HW_CAST), mask=inside)
            tl.store(dup + at, f32_to_bf16(v_up, HW_CAST), mask=inside)
    if WEIGHTED:
        tl.store(dprob + m, tl.sum(total, 1), mask=m < M)


@triton.jit
def _kernel(
    gate, up, prob, M, h,
    F: tl.constexpr, WEIGHTED: tl.constexpr, HW_CAST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    _forward_tile(
        gate, up, prob, M, h, None, None, None, None, F, WEIGHTED, False, False, 0, 0, HW_CAST, BLOCK_M, BLOCK_K
    )


@triton.jit
def _row_kernel(
    gate, up, prob, M, q, sf,
    F: tl.constexpr, WEIGHTED: tl.constexpr, rounding: tl.constexpr, satfinite: tl.constexpr,
    HW_CAST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    _forward_tile(
        gate, up, prob, M, None, q, sf, None, None, F, WEIGHTED, True, False,
        rounding, satfinite, HW_CAST, BLOCK_M, BLOCK_K,
    )  # fmt: skip


@triton.jit
def _col_kernel(
    gate, up, prob, M, q_t, sf_t,
    F: tl.constexpr, WEIGHTED: tl.constexpr, rounding: tl.constexpr, satfinite: tl.constexpr,
    HW_CAST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    _forward_tile(
        gate, up, prob, M, None, None, None, q_t, sf_t, F, WEIGHTED, False, True,
        rounding, satfinite, HW_CAST, BLOCK_M, BLOCK_K,
    )  # fmt: skip


@triton.jit
def _both_kernel(
    gate, up, prob, M, q, sf, q_t, sf_t,
    F: tl.constexpr, WEIGHTED: tl.constexpr, rounding: tl.constexpr, satfinite: tl.constexpr,
    HW_CAST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    _forward_tile(
        gate, up, prob, M, None, q, sf, q_t, sf_t, F, WEIGHTED, True, True,
        rounding, satfinite, HW_CAST, BLOCK_M, BLOCK_K,
    )  # fmt: skip


@triton.jit
def _bwd_kernel(
    dh, gate, up, prob, M, dgate, dup, dprob,
    F: tl.constexpr, WEIGHTED: tl.constexpr, HW_CAST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    _backward_strip(
        dh, gate, up, prob, M, dgate, dup, None, None, None, None, None, None, None, None, dprob,
        F, WEIGHTED, False, False, 0, 0, HW_CAST, BLOCK_M, BLOCK_K,
    )  # fmt: skip


@triton.jit
def _bwd_row_kernel(
    dh, gate, up, prob, M, dgate_q, dgate_sf, dup_q, dup_sf, dprob,
    F: tl.constexpr, WEIGHTED: tl.constexpr, rounding: tl.constexpr, satfinite: tl.constexpr,
    HW_CAST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    _backward_strip(
        dh, gate, up, prob, M, None, None, dgate_q, dgate_sf, None, None, dup_q, dup_sf, None, None, dprob,
        F, WEIGHTED, True, False, rounding, satfinite, HW_CAST, BLOCK_M, BLOCK_K,
    )  # fmt: skip


@triton.jit
def _bwd_col_kernel(
    dh, gate, up, prob, M, dgate_q_t, dgate_sf_t, dup_q_t, dup_sf_t, dprob,
    F: tl.constexpr, WEIGHTED: tl.constexpr, rounding: tl.constexpr, satfinite: tl.constexpr,
    HW_CAST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    _backward_strip(
        dh, gate, up, prob, M, None, None, None, None, dgate_q_t, dgate_sf_t, None, None, dup_q_t, dup_sf_t, dprob,
        F, WEIGHTED, False, True, rounding, satfinite, HW_CAST, BLOCK_M, BLOCK_K,
    )  # fmt: skip


@triton.jit
def _bwd_both_kernel(
    dh, gate, up, prob, M,
    dgate_q, dgate_sf, dgate_q_t, dgate_sf_t, dup_q, dup_sf, dup_q_t, dup_sf_t, dprob,
    F: tl.constexpr, WEIGHTED: tl.constexpr, rounding: tl.constexpr, satfinite: tl.constexpr,
    HW_CAST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    _backward_strip(
        dh, gate, up, prob, M, None, None,
        dgate_q, dgate_sf, dgate_q_t, dgate_sf_t, dup_q, dup_sf, dup_q_t, dup_sf_t, dprob,
        F, WEIGHTED, True, True, rounding, satfinite, HW_CAST, BLOCK_M, BLOCK_K,
    )  # fmt: skip


def _is_weighted(op: str, arrays: dict[str, ArrayType], prob: ArrayType) -> bool:
    """Check the arguments of `op`, `arrays` being those that have gate's shape; whether `prob` has a weight per row."""
    require_rank(op, "gate", arrays["gate"], 2)
    shape = arrays["gate"].shape
    for name, array in arrays.items():
        require_dtype(op, name, array, "bfloat16")
        require_shape(op, name, array, shape, "gate's")
    require_dtype(op, "prob", prob, "float32")
    # An empty tensor's size is a number also while a compiler traces; one that is a symbol counts rows.
    if len(prob.shape) == 1 and isinstance(prob.shape[0], int) and prob.shape[0] == 0:
        return False
    require_shape(op, "prob", prob, shape[:1], "one weight per row; or (0,): every row weighs one")
    return True


def _result_types(op: str, shape: tuple[int, ...], row: bool, col: bool) -> tuple[ArrayType, ...]:
    """What an (M, F) result is written as: bf16, or bytes scaled along rows, columns or both."""
    m, f = shape
    if row:
        require_multiple(op, "gate", f, BLOCK, "last dim")
    if col:
        require_multiple(op, "gate", m, BLOCK, "dim 0 (scaled along)")
    along_row = (ArrayType((m, f), "uint8"), ArrayType((m, f // BLOCK), "uint8")) if row else ()
    along_col = (ArrayType((f, m), "uint8"), ArrayType((f, m // BLOCK), "uint8")) if col else ()
    return along_row + along_col or (ArrayType((m, f), "bfloat16"),)


def _define(op: str, kernel: object, inputs: tuple[str, ...], row: bool = False, col: bool = False) -> KernelOp:
    backward, quantized = "dh" in inputs, row or col
    parts = ("_q", "_sf") * row + ("_q_t", "_sf_t") * col or ("",)
    names = ("dgate", "dup") if backward else ("h",)
    outputs = (*(f"{name}{part}" for name in names for part in parts), *(("dprob",) if backward else ()))

    def launch(arrays: tuple[ArrayType, ...], arch: str, attrs: dict[str, int]) -> Launch:
        *same_shape, prob = arrays
        weighted = _is_weighted(op, dict(zip(inputs, same_shape, strict=False)), prob)
        m, f = shape = arrays[0].shape
        result = _result_types(op, shape, row, col)
        out = (*result, *result, prob) if backward else result
        if arch == "cpu":
            return Launch(out, tuple(attrs.values()))
        t = strip_tiles(op, arch, f) if backward and not col else tiles(op, arch, row_width=f)
        down, across = cdiv(m, t.m), cdiv(f, t.k)
        return Launch(
            out=out,
            attrs=tuple(attrs.values()),
            # a backward program with `prob` walks along its rows, also where they are empty
            grid=(down, 1 if weighted else across) if backward else (down * across,),
            scalars={"M": m},
            meta={"F": f, "WEIGHTED": weighted, **attrs, "HW_CAST": hw_cast(arch), "BLOCK_M": t.m, "BLOCK_K": t.k},
            num_warps=t.num_warps,
            num_stages=t.num_stages,
        )

    def plan(*arrays: ArrayType, arch: str) -> Launch:
        return launch(arrays, arch, {})

    def plan_quantized(
        *arrays: ArrayType, arch: str, rounding: Rounding = Rounding.RCEIL, satfinite: bool = False
    ) -> Launch:
        return launch(arrays, arch, scale_attrs(op, rounding, satfinite))

    attrs, make_plan = (("rounding", "satfinite"), plan_quantized) if quantized else ((), plan)
    return KernelOp(op, kernel, inputs, outputs, attrs, make_plan)


_FORWARD, _BACKWARD = ("gate", "up", "prob"), ("dh", "gate", "up", "prob")
swiglu = _define("swiglu", _kernel, _FORWARD)
swiglu_row = _define("swiglu_row", _row_kernel, _FORWARD, row=True)
swiglu_col = _define("swiglu_col", _col_kernel, _FORWARD, col=True)
swiglu_both = _define("swiglu_both", _both_kernel, _FORWARD, row=True, col=True)
swiglu_bwd = _define("swiglu_bwd", _bwd_kernel, _BACKWARD)
swiglu_bwd_row = _define("swiglu_bwd_row", _bwd_row_kernel, _BACKWARD, row=True)
swiglu_bwd_col = _define("swiglu_bwd_col", _bwd_col_kernel, _BACKWARD, col=True)
swiglu_bwd_both = _define("swiglu_bwd_both", _bwd_both_kernel, _BACKWARD, row=True, col=True)
