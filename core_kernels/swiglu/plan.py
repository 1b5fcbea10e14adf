"""SwiGLU between the two products of an expert, forward and backward, with its results quantized.

    gate, up (M, F)  --swiglu---------> h (M, F) bf16         h = silu(gate) * up * prob, or the form of activation.py
      prob (M,)      --swiglu_row-----> quantize_row(h)       for the product with w2
                     --swiglu_col-----> quantize_col(h)       for the gradient of w2

    dh, gate, up     --swiglu_bwd-----> dgate, dup (M, F) bf16, dprob (M,) fp32
      prob           --swiglu_bwd_row-> quantize_row of each; likewise _col and _both
                     --swiglu_bwd_all-> quantize_both of each, and quantize_col of h again: gate and up are read once

`prob` of shape (0,) gives every row the weight one. h, dgate and dup are rounded to bf16 before they are quantized,
so a fused op writes the bytes of the two ops that it replaces. oracle.py defines every byte; only the order of the
sum dprob is free. folded/plan.py has h folded too, and folded/plan_bwd.py every result of swiglu_bwd_all.

Triton has kernels of swiglu and swiglu_bwd. Where neither CUDA C++ nor C++ runs, the other ops are composed of them and
of quantize_*: h, or dgate and dup, are stored and read once more, 4 bytes per value.
"""

from collections.abc import Callable
from itertools import chain
from typing import Any

from ..dispatch import facts
from ..formats import BLOCK, Rounding, scale_attrs
from ..launch import (
    NO_ENDS,
    ROWS_UP_TO,
    ArrayType,
    Call,
    KernelOp,
    Signature,
    Tiling,
    check_optional_ends,
    require_dtype,
    require_multiple,
    require_rank,
    require_shape,
)
from ..quantize.plan import SCALES, col_types, quantize_both, quantize_col, quantize_row
from ..tiles import cdiv, looping_programs, strip_tiles, tiles
from .activation import swiglu_attrs

UNWEIGHTED = (0,)
"""The shape of `prob` for weights of one."""
UP_PROB = """up: (M, F) bf16.
        prob: (M,) fp32, or shape (0,) for weights of one."""
NUMBERS = """alpha: 1/64 to 64; h = (up + offset) * gate * sigmoid(alpha * gate) * prob.
        limit: gate is clamped to at most `limit`, and up to [-limit, limit]; 0 is no limit. The gradient of a clamped
            value is 0.
        offset: is added to the clamped up."""
"""The options of all ops of SwiGLU, as entries under `Args:` of their docs."""


def check_arrays(op: str, arrays: dict[str, ArrayType], prob: ArrayType) -> tuple[int, ...]:
    """The shape of gate; raises unless `arrays` have it and prob has a weight per row or shape (0,)."""
    require_rank(op, "gate", arrays["gate"], 2)
    shape = arrays["gate"].shape
    for name, array in arrays.items():
        require_dtype(op, name, array, "bfloat16")
        require_shape(op, name, array, shape, "gate's")
    require_dtype(op, "prob", prob, "float32")
    # The size of an empty array is a number also while a compiler traces; a symbolic size counts rows.
    if not (len(prob.shape) == 1 and isinstance(prob.shape[0], int) and prob.shape[0] == 0):
        require_shape(op, "prob", prob, shape[:1], "one weight per row; or (0,): every row weighs one")
    return shape


def _result_types(op: str, h: ArrayType, quantize: KernelOp | None) -> tuple[ArrayType, ...]:
    """An (M, F) result: bf16 `h`, or what `quantize` makes of it."""
    if quantize is None:
        return (h,)
    if quantize is not quantize_col:
        require_multiple(op, "gate", h.shape[1], BLOCK, "last dim")
    if quantize is not quantize_row:
        require_multiple(op, "gate", h.shape[0], BLOCK, "dim 0 (scaled along)")
    return quantize.check(h).out


def _tile_forward(call: Call, arch: str) -> Tiling:
    m, f = call.inputs[0].shape
    t = tiles(call.op, arch, row_width=f)
    return t.tiling((looping_programs(cdiv(m, t.m) * cdiv(f, t.k)),), {"M": m}, **meta_of_rows(call, arch, t.m, t.k))


def _tile_backward(call: Call, arch: str) -> Tiling:
    """With `prob` a program takes whole rows, also empty ones, since dprob is a sum over a row."""
    m, f = call.inputs[0].shape
    t = strip_tiles(call.op, arch, f)
    across = 1 if call.inputs[-2].shape != UNWEIGHTED else cdiv(f, t.k)
    return t.tiling((looping_programs(cdiv(m, t.m)), across), {"M": m}, **meta_of_rows(call, arch, t.m, t.k))


def meta_of_rows(call: Call, arch: str, block_m: int, block_k: int) -> dict[str, int]:
    """The constexprs of a kernel whose inputs end with prob and group_ends."""
    *_, prob, group_ends = call.inputs
    shape = {"F": call.inputs[0].shape[1], "G": group_ends.shape[0], "WEIGHTED": prob.shape != UNWEIGHTED}
    return {**shape, "HW_CAST": facts(arch).hw_cast, "BLOCK_M": block_m, "BLOCK_K": block_k}


def _tile_quantized(call: Call, arch: str) -> Tiling:
    """The same on every architecture. Without columns only dprob is written."""
    m, f = call.inputs[0].shape
    sums = call.op.startswith("swiglu_bwd") and call.inputs[-1].shape != UNWEIGHTED
    return Tiling(grid=(m, 1 if sums else f))


def _compose_all(
    call: Callable[..., tuple[Any, ...]], dh: Any, gate: Any, up: Any, prob: Any, **options: Any
) -> tuple[Any, ...]:
    *gradients, dprob = call(swiglu_bwd_both, dh, gate, up, prob, **options)
    return *gradients, *call(swiglu_col, gate, up, prob, **options), dprob


def _define(op: str, doc: str, quantize: KernelOp | None = None, hidden: bool = False) -> KernelOp:
    """quantize: the quantization of the results, h, or dgate and dup. hidden: a backward has h too, along columns."""
    backward = op.startswith("swiglu_bwd")
    arguments = ("dh", "gate", "up", "prob") if backward else ("gate", "up", "prob")
    results = ("dgate", "dup") if backward else ("h",)
    scaled = [f"_{part}" for part in quantize.outputs] if quantize else [""]
    outputs = (
        *(f"{name}{part}" for name in results for part in scaled),
        *(("h_q_t", "h_sf_t") if hidden else ()),
        *(("dprob",) if backward else ()),
    )

    def out(*arrays: ArrayType) -> tuple[ArrayType, ...]:
        shape = check_arrays(op, dict(zip(arguments[:-1], arrays[:-1], strict=True)), arrays[-1])
        result = _result_types(op, ArrayType(shape, "bfloat16"), quantize)
        if not backward:
            return result
        return *result, *result, *(col_types(arrays[0]) if hidden else ()), arrays[-1]

    def check(*inputs: ArrayType, alpha: float = 1.0, limit: float = 0.0, offset: float = 0.0) -> Signature:
        *arrays, group_ends = inputs if len(inputs) > len(arguments) else (*inputs, NO_ENDS)
        types = out(*arrays)
        tokens = check_optional_ends(op, group_ends, arrays[0].shape)
        return Signature(types, swiglu_attrs(op, alpha, limit, offset), tokens)

    def check_quantized(
        *arrays: ArrayType, rounding: Rounding = Rounding.RCEIL, satfinite: bool = False,
        alpha: float = 1.0, limit: float = 0.0, offset: float = 0.0,
    ) -> Signature:  # fmt: skip
        attrs = scale_attrs(op, rounding, satfinite) | swiglu_attrs(op, alpha, limit, offset)
        return Signature(out(*arrays), attrs)

    def compose(
        call: Callable[..., tuple[Any, ...]], *arrays: Any,
        rounding: Rounding = Rounding.RCEIL, satfinite: bool = False, **numbers: Any,
    ) -> tuple[Any, ...]:  # fmt: skip
        found = call(swiglu_bwd if backward else swiglu, *arrays, **numbers)
        quantized = (call(quantize, x, rounding=rounding, satfinite=satfinite) for x in found[: len(results)])
        return *chain(*quantized), *found[len(results) :]

    if quantize:
        how = _compose_all if hidden else compose
        return KernelOp(op, doc, arguments, outputs, check_quantized, _tile_quantized, compose=how)
    tile, kernel = (_tile_backward, "bwd_kernel") if backward else (_tile_forward, "forward_kernel")
    inputs = *arguments, "group_ends"
    return KernelOp(op, doc, inputs, outputs, check, tile, f"swiglu.kernel:{kernel}", optional_ends=True)


swiglu = _define(
    "swiglu",
    f"""silu(gate) * up * prob, the activation between the two products of an expert, and its clamped forms.

    Args:
        gate: (M, F) bf16.
        {UP_PROB}
        {ROWS_UP_TO}
        {NUMBERS}

    Returns:
        h (M, F) bf16.

    Raises:
        ValueError: shape.
        TypeError: dtype.

    Example:
        >>> one = xp.ones((1, 1), dtype=xp.bfloat16)
        >>> float(ops.swiglu(one, one, xp.zeros((0,)))[0, 0])  # sigmoid(1) = 0.7311, to 8 bits
        0.73046875

    Source:
        Shazeer, "GLU Variants Improve Transformer", 2020.
    """,
)
swiglu_row = _define(
    "swiglu_row",
    f"""`quantize_row` of `swiglu` in one pass; h is not stored.

    Args:
        gate: (M, F) bf16. F is a multiple of 32.
        {UP_PROB}
        {SCALES}
        {NUMBERS}

    Returns:
        h_q (M, F) E4M3 and h_sf (M, F/32) E8M0, as uint8.

    Raises:
        ValueError: shape.
        TypeError: dtype.

    Example:
        >>> one = xp.ones((32, 32), dtype=xp.bfloat16)
        >>> h_q, h_sf = ops.swiglu_row(one, one, xp.zeros((0,)))
        >>> int(h_q[0, 0]), int(h_sf[0, 0])  # 0.73 becomes 0.75 = 384 * 2^-9
        (124, 118)
    """,
    quantize_row,
)
swiglu_col = _define(
    "swiglu_col",
    f"""`quantize_col` of `swiglu` in one pass; h is not stored.

    Args:
        gate: (M, F) bf16. M is a multiple of 32.
        {UP_PROB}
        {SCALES}
        {NUMBERS}

    Returns:
        h_q_t (F, M) E4M3 and h_sf_t (F, M/32) E8M0, as uint8.

    Raises:
        ValueError: shape.
        TypeError: dtype.

    Example:
        >>> one = xp.ones((32, 32), dtype=xp.bfloat16)
        >>> h_q_t, h_sf_t = ops.swiglu_col(one, one, xp.zeros((0,)))
        >>> int(h_q_t[0, 0]), int(h_sf_t[0, 0])  # 0.73 becomes 0.75 = 384 * 2^-9
        (124, 118)
    """,
    quantize_col,
)
swiglu_bwd = _define(
    "swiglu_bwd",
    f"""The gradients of `swiglu`.

    Args:
        dh: (M, F) bf16.
        gate: (M, F) bf16.
        {UP_PROB}
        {ROWS_UP_TO}
        {NUMBERS}

    Returns:
        dgate and dup (M, F) bf16, and dprob (M,) fp32, zeros past the last end, or (0,) with prob of shape (0,).

    Raises:
        ValueError: shape.
        TypeError: dtype.

    Example:
        >>> one = xp.ones((1, 1), dtype=xp.bfloat16)
        >>> dgate, dup, _ = ops.swiglu_bwd(one, one, one, xp.zeros((0,)))
        >>> float(dgate[0, 0]), float(dup[0, 0])
        (0.92578125, 0.73046875)

    Source:
        Shazeer, "GLU Variants Improve Transformer", 2020.
    """,
)
swiglu_bwd_row = _define(
    "swiglu_bwd_row",
    f"""`swiglu_bwd` and `quantize_row` of dgate and dup in one pass.

    Args:
        dh: (M, F) bf16. F is a multiple of 32.
        gate: (M, F) bf16.
        {UP_PROB}
        {SCALES}
        {NUMBERS}

    Returns:
        dgate_q (M, F), dgate_sf (M, F/32), dup_q, dup_sf, uint8, and dprob (M,) fp32, or (0,).

    Raises:
        ValueError: shape.
        TypeError: dtype.

    Example:
        >>> one = xp.ones((32, 32), dtype=xp.bfloat16)
        >>> [tuple(x.shape) for x in ops.swiglu_bwd_row(one, one, one, xp.ones((32,)))]
        [(32, 32), (32, 1), (32, 32), (32, 1), (32,)]
    """,
    quantize_row,
)
swiglu_bwd_col = _define(
    "swiglu_bwd_col",
    f"""`swiglu_bwd` and `quantize_col` of dgate and dup in one pass.

    Args:
        dh: (M, F) bf16. M is a multiple of 32.
        gate: (M, F) bf16.
        {UP_PROB}
        {SCALES}
        {NUMBERS}

    Returns:
        dgate_q_t (F, M), dgate_sf_t (F, M/32), dup_q_t, dup_sf_t, uint8, and dprob (M,) fp32, or (0,).

    Raises:
        ValueError: shape.
        TypeError: dtype.

    Example:
        >>> one = xp.ones((32, 32), dtype=xp.bfloat16)
        >>> [tuple(x.shape) for x in ops.swiglu_bwd_col(one, one, one, xp.ones((32,)))]
        [(32, 32), (32, 1), (32, 32), (32, 1), (32,)]
    """,
    quantize_col,
)
swiglu_bwd_both = _define(
    "swiglu_bwd_both",
    f"""`swiglu_bwd` and `quantize_both` of dgate and dup in one pass.

    Args:
        dh: (M, F) bf16. M and F are multiples of 32.
        gate: (M, F) bf16.
        {UP_PROB}
        {SCALES}
        {NUMBERS}

    Returns:
        dgate_q, dgate_sf, dgate_q_t, dgate_sf_t, dup_q, dup_sf, dup_q_t, dup_sf_t, uint8, and dprob (M,) fp32, or (0,).

    Raises:
        ValueError: shape.
        TypeError: dtype.

    Example:
        >>> one = xp.ones((32, 32), dtype=xp.bfloat16)
        >>> sorted({{tuple(x.shape) for x in ops.swiglu_bwd_both(one, one, one, xp.ones((32,)))}})
        [(32,), (32, 1), (32, 32)]
    """,
    quantize_both,
)
swiglu_bwd_all = _define(
    "swiglu_bwd_all",
    f"""`swiglu_bwd_both`, and `swiglu_col`, in one pass: for a backward that multiplies along both dims.

    Args:
        dh: (M, F) bf16. M and F are multiples of 32.
        gate: (M, F) bf16.
        {UP_PROB}
        {SCALES}
        {NUMBERS}

    Returns:
        dgate_q, dgate_sf, dgate_q_t, dgate_sf_t, dup_q, dup_sf, dup_q_t, dup_sf_t, h_q_t and h_sf_t, uint8, and dprob
        (M,) fp32, or (0,).

    Raises:
        ValueError: shape.
        TypeError: dtype.

    Example:
        >>> one = xp.ones((32, 32), dtype=xp.bfloat16)
        >>> len(ops.swiglu_bwd_all(one, one, one, xp.ones((32,))))  # ten operands and dprob
        11
    """,
    quantize_both,
    hidden=True,
)
