"""The definition of every operation and of its gradient, in numpy: slow, obvious, and no kernel's kin.

    quantize_*  dequantize  fold_rows         bytes, exact
    block_scales  unblock_scales              bytes, exact
    sort_by_expert  row_map  permute_*        bytes, exact
    all_to_all  all_to_all_vjp                bytes, exact
    grouped_mm_*  grouped_wgrad_*             sums in fp64, rounded once

Folded operands and their products are in oracle_folded.py, a differentiable product in each form of its operands in
oracle_products.py, a whole layer in oracle_layer.py.

Functions have the names and the argument order of the ops they define. q and sf are uint8, bf16 is
`ml_dtypes.bfloat16`. Source: OCP Microscaling Formats (MX) Specification v1.0 sections 5 and 6, OFP8 v1.0
section 5; the choice of RCEIL and of what happens at the edges is the numerics contract's.
"""

from collections.abc import Sequence

import ml_dtypes
import numpy as np

from .formats import BLOCK, E4M3_EMAX, E4M3_MAX, E4M3_NAN, E8M0_BIAS, E8M0_MAX, E8M0_NAN, Rounding

Array = np.ndarray
Pair = tuple[Array, Array]
DTYPES = {name: np.dtype(name) for name in ("float32", "float64")} | {"bfloat16": np.dtype(ml_dtypes.bfloat16)}


# --- formats ------------------------------------------------------------------------------------


def _e4m3_value(code: int) -> float:
    """S.EEEE.MMM with bias 7: subnormals are M * 2^-9, and 0x7F is the one NaN (OFP8 table 2)."""
    exponent, mantissa = code >> 3 & 15, code & 7
    magnitude = np.ldexp(8 + mantissa, exponent - 10) if exponent else np.ldexp(mantissa, -9)
    if code & E4M3_NAN == E4M3_NAN:
        return np.nan
    return float(-magnitude if code & 0x80 else magnitude)


E4M3_VALUES = np.array([_e4m3_value(code) for code in range(256)])
_MAGNITUDES = E4M3_VALUES[:E4M3_NAN]
_MIDPOINTS = (_MAGNITUDES[:-1] + _MAGNITUDES[1:]) / 2


def to_e4m3(x: Array) -> Array:
    """fp64 -> E4M3 bytes: nearest value, ties to the even code, +-448 beyond the range, NaN -> 0x7F."""
    magnitude = np.abs(x)
    below = np.searchsorted(_MIDPOINTS, magnitude, side="left")
    above = np.searchsorted(_MIDPOINTS, magnitude, side="right")  # differs from `below` at a tie only
    code = np.where(below % 2 == 0, below, above) | np.where(np.signbit(x), 0x80, 0)
    return np.where(np.isnan(x), E4M3_NAN, code).astype(np.uint8)


def e8m0_value(byte: Array) -> Array:
    """E8M0 bytes -> fp64 powers of two, 255 -> NaN."""
    return np.where(byte == E8M0_NAN, np.nan, np.ldexp(1.0, byte.astype(np.int32) - E8M0_BIAS))


def scale_byte(amax: Array, rounding: Rounding | str = Rounding.RCEIL, satfinite: bool = False) -> Array:
    """The E8M0 byte of a block from its fp32 amax.

    >>> scale_byte(np.float32([448, 449, 0]))  # 2^0, 2^1, the smallest scale
    array([127, 128,   0], dtype=uint8)
    """
    amax = np.asarray(amax, np.float32)
    finite = np.where(np.isfinite(amax), amax, np.float32(0))
    if Rounding.parse(rounding) is Rounding.RCEIL:
        # m * 2^e with m in [1/2, 1): the smallest power of two >= it is 2^e, or 2^(e-1) at m = 1/2
        ratio = finite / np.float32(E4M3_MAX)
        m, e = np.frexp(ratio)
        exponent = e - (m == 0.5)
    else:
        ratio = finite
        exponent = np.frexp(ratio)[1] - 1 - E4M3_EMAX
    byte = np.where(ratio == 0, 0, np.maximum(exponent + E8M0_BIAS, 0))
    byte = np.where(np.isinf(amax), E8M0_MAX if satfinite else E8M0_NAN, byte)
    return np.where(np.isnan(amax), E8M0_NAN, byte).astype(np.uint8)


def round_to(x: Array, dtype: str) -> Array:
    """fp64 -> float32 or bfloat16 in one rounding, to nearest even; float64 is the identity."""
    with np.errstate(over="ignore", invalid="ignore"):
        if dtype == "bfloat16":
            # 8 significant bits, and no bit below 2^-133. A cast through fp32 would round twice.
            finite = np.where(np.isfinite(x), x, 0)
            ulp = np.ldexp(1.0, np.maximum(np.frexp(finite)[1] - 8, -133))
            x = np.where(np.isfinite(x), np.rint(finite / ulp) * ulp, x)
        return x.astype(DTYPES[dtype])


# --- quantize -----------------------------------------------------------------------------------


def quantize_blocks(blocks: Array, rounding: Rounding | str, satfinite: bool) -> Pair:
    """blocks (..., B) -> q (..., B), sf (...): one scale for the last dim, however long."""
    blocks = blocks.astype(np.float32)
    sf = scale_byte(np.abs(blocks).max(-1), rounding, satfinite)
    with np.errstate(invalid="ignore"):
        # byte 255 makes the scale NaN, and with it the whole block
        return to_e4m3(blocks.astype(np.float64) / e8m0_value(sf)[..., None]), sf


def quantize_row(x: Array, rounding: Rounding | str = Rounding.RCEIL, satfinite: bool = False) -> Pair:
    """x (..., K) -> q (..., K), sf (..., K/32): one scale per 32 values of the last dim."""
    q, sf = quantize_blocks(x.reshape(*x.shape[:-1], x.shape[-1] // BLOCK, BLOCK), rounding, satfinite)
    return q.reshape(x.shape), sf


def quantize_row_packed(x: Array, rounding: Rounding | str = Rounding.RCEIL, satfinite: bool = False) -> Array:
    """x (M, K) -> wire rows [q | sf] (M, K + K/32)."""
    return np.concatenate(quantize_row(x, rounding, satfinite), axis=-1)


def quantize_col(x: Array, rounding: Rounding | str = Rounding.RCEIL, satfinite: bool = False) -> Pair:
    """x (..., M, K) -> q_t (..., K, M), sf_t (..., K, M/32): one scale per 32 values of a column."""
    return quantize_row(np.ascontiguousarray(np.swapaxes(x, -1, -2)), rounding, satfinite)


def quantize_both(
    x: Array, rounding: Rounding | str = Rounding.RCEIL, satfinite: bool = False
) -> tuple[Array, Array, Array, Array]:
    """x (..., M, K) -> q, sf of quantize_row, then q_t, sf_t of quantize_col."""
    return *quantize_row(x, rounding, satfinite), *quantize_col(x, rounding, satfinite)


def dequantize64(q: Array, sf: Array) -> Array:
    return E4M3_VALUES[q] * np.repeat(e8m0_value(sf), BLOCK, axis=-1)


def dequantize(q: Array, sf: Array, out_dtype: str = "bfloat16") -> Array:
    """q (..., K), sf (..., K/32) -> x (..., K)."""
    return round_to(dequantize64(q, sf), out_dtype)


def fold_rows(q: Array, sf: Array) -> Pair:
    """q (..., K), sf (..., K/32) -> qf (..., K), row_sf (...): all blocks under the row's largest scale.

    A NaN block (byte 255) has no say in the row's scale and becomes elements 0x7F; a row of NaN blocks has 255.
    """
    largest = np.where(sf == E8M0_NAN, -1, sf.astype(np.int32)).max(-1)
    factor = np.where(sf == E8M0_NAN, np.nan, np.ldexp(1.0, sf.astype(np.int32) - largest[..., None]))
    row_sf = np.where(largest < 0, E8M0_NAN, largest).astype(np.uint8)
    return to_e4m3(E4M3_VALUES[q] * np.repeat(factor, BLOCK, axis=-1)), row_sf


def quantize_row_fold(x: Array, rounding: Rounding | str = Rounding.RCEIL, satfinite: bool = False) -> Pair:
    """x (..., K) -> qf (..., K), row_sf (...)."""
    return fold_rows(*quantize_row(x, rounding, satfinite))


# --- scale layout -------------------------------------------------------------------------------

TILE_ROWS, TILE_SCALES = 128, 4


def _padded_row_of(group_ends: Array) -> list[int]:
    """Where each row goes when every group is padded to 128 rows."""
    rows: list[int] = []
    start = 0
    for group in group_slices(group_ends):
        size = group.stop - group.start
        rows += range(start, start + size)
        start += -(-size // TILE_ROWS) * TILE_ROWS
    return rows


def block_scales(sf: Array, group_ends: Array) -> Array:
    """sf (M, S) -> (P, S4): groups padded to 128 rows, S to a multiple of 4, each 128 x 4 tile in 512 bytes.

    P = M + 127 * G, rounded down to 128. In a tile row r = 32 * a + b, scale c lies at byte 16 * b + 4 * a + c.
    Padding, and what would be rows past the last end, is 0.
    """
    m, s = sf.shape
    p = (m + (TILE_ROWS - 1) * len(group_ends)) // TILE_ROWS * TILE_ROWS
    padded = np.zeros((p, -(-s // TILE_SCALES) * TILE_SCALES), np.uint8)
    rows = _padded_row_of(group_ends)
    padded[rows, :s] = sf[: len(rows)]
    tiles = padded.reshape(p // TILE_ROWS, 4, 32, -1, TILE_SCALES)  # row tile, a, b, column tile, c
    return np.ascontiguousarray(tiles.transpose(0, 3, 2, 1, 4)).reshape(padded.shape)


def unblock_scales(blocked: Array, group_ends: Array, num_rows: int, num_scales: int) -> Array:
    """The inverse: blocked (P, S4) -> sf (num_rows, num_scales); rows past the last end are zeros."""
    p, s4 = blocked.shape
    tiles = blocked.reshape(p // TILE_ROWS, s4 // TILE_SCALES, 32, 4, TILE_SCALES)
    padded = tiles.transpose(0, 3, 2, 1, 4).reshape(p, s4)
    sf = np.zeros((num_rows, num_scales), np.uint8)
    rows = _padded_row_of(group_ends)
    sf[: len(rows)] = padded[rows, :num_scales]
    return sf


# --- routing and permutation ----------------------------------------------------------------------


def sort_by_expert(expert_ids: Array, num_experts: int) -> tuple[Array, Array, Array]:
    """expert_ids (T,) -> order (T,), inverse (T,), counts (E,), all int32.

    >>> sort_by_expert(np.int32([1, 0, 1]), 2)
    (array([1, 0, 2], dtype=int32), array([1, 0, 2], dtype=int32), array([1, 2], dtype=int32))
    """
    slots = range(len(expert_ids))
    order = np.array(sorted(slots, key=lambda slot: expert_ids[slot]), np.int32)  # sorted() is stable
    inverse = np.empty_like(order)
    inverse[order] = np.arange(len(order))
    counts = np.array([np.sum(expert_ids == e) for e in range(num_experts)], np.int32)
    return order, inverse, counts


def row_map(
    counts: Array, num_rows: int, num_local_experts: int, alignment: int = BLOCK, rank_rows: int = 0
) -> tuple[Array, Array, Array, Array]:
    """counts (ranks * local experts,) -> row_map (P,), inverse (num_rows,), padded_counts (G,), group_ends (G,).

    P = num_rows + G * alignment, rounded up to `alignment`: room for any split of the rows.
    """
    counts = counts.reshape(-1, num_local_experts)
    rows_of: list[list[int]] = [[] for _ in range(num_local_experts)]
    start = 0
    for rank, row in enumerate(counts):
        next_row = rank * rank_rows if rank_rows else start
        for expert, count in enumerate(row):
            rows_of[expert] += range(next_row, next_row + int(count))
            next_row += int(count)
        start = next_row

    padded: list[int] = []
    padded_counts = []
    for rows in rows_of:
        size = max(-(-len(rows) // alignment), 1) * alignment
        padded += rows + [-1] * (size - len(rows))
        padded_counts.append(size)
    total = -(-(num_rows + num_local_experts * alignment) // alignment) * alignment
    padded += [-1] * (total - len(padded))

    inverse = np.full(num_rows, -1, np.int32)
    for position, row in enumerate(padded):
        if row >= 0:
            inverse[row] = position
    return np.array(padded, np.int32), inverse, np.array(padded_counts, np.int32), np.cumsum(padded_counts, dtype="i4")


def permute_rows(x: Array, row_map: Array) -> Array:
    """x (R, K), row_map (P,) -> out (P, K): row row_map[i] of x, or zeros where it is -1."""
    out = np.zeros((len(row_map), x.shape[1]), x.dtype)
    for i, row in enumerate(row_map):
        if row >= 0:
            out[i] = x[row]
    return out


def permute_rows_vjp(dout: Array, row_map: Array, num_rows: int) -> Array:
    """Cotangent of x: each row's sum over the places it went to, rounded once to dout's dtype."""
    dx = np.zeros((num_rows, dout.shape[1]))
    for i, row in enumerate(row_map):
        if row >= 0:
            dx[row] += dout[i].astype(np.float64)
    return round_to(dx, dout.dtype.name)


def permute_mx(packed: Array, row_map: Array) -> Pair:
    """packed (R, K + K/32), row_map (P,) -> q (P, K), sf (P, K/32)."""
    k = packed.shape[1] // (BLOCK + 1) * BLOCK
    rows = permute_rows(packed, row_map)
    return np.ascontiguousarray(rows[:, :k]), np.ascontiguousarray(rows[:, k:])


def permute_mx_fold(packed: Array, row_map: Array) -> Pair:
    """packed (R, K + K/32), row_map (P,) -> qf (P, K), row_sf (P,)."""
    return fold_rows(*permute_mx(packed, row_map))


# --- collectives ----------------------------------------------------------------------------------


def all_to_all(inputs: Sequence[Array], splits: Sequence[Sequence[int]]) -> list[Array]:
    """inputs[r] is rank r's rows, splits[r][s] how many of them go to rank s; returns what each rank holds after.

    Received rows lie in the order of the sending rank.
    """
    ranks = range(len(inputs))
    parts = [np.split(x, np.cumsum(split)[:-1]) for x, split in zip(inputs, splits, strict=True)]
    return [np.concatenate([parts[sender][receiver] for sender in ranks]) for receiver in ranks]


def all_to_all_vjp(douts: Sequence[Array], splits: Sequence[Sequence[int]]) -> list[Array]:
    """Cotangents of `inputs`: the rows go back where they came from."""
    return all_to_all(douts, np.transpose(splits).tolist())


# --- grouped GEMM ---------------------------------------------------------------------------------


def group_slices(group_ends: Array) -> list[slice]:
    return [slice(int(a), int(b)) for a, b in zip([0, *group_ends], group_ends, strict=False)]


def m_grouped(lhs: Array, rhs_t: Array, group_ends: Array, out_dtype: str) -> Array:
    out = np.zeros((lhs.shape[0], rhs_t.shape[1]))
    with np.errstate(invalid="ignore", over="ignore"):
        for g, rows in enumerate(group_slices(group_ends)):
            out[rows] = lhs[rows].astype(np.float64) @ rhs_t[g].astype(np.float64).T
    return round_to(out, out_dtype)


def k_grouped(lhs: Array, rhs: Array, group_ends: Array, out_dtype: str) -> Array:
    out = np.zeros((len(group_ends), lhs.shape[1], rhs.shape[1]))
    with np.errstate(invalid="ignore", over="ignore"):
        for g, rows in enumerate(group_slices(group_ends)):
            out[g] = lhs[rows].astype(np.float64).T @ rhs[rows].astype(np.float64)
    return round_to(out, out_dtype)


def grouped_mm_mx(
    lhs_q: Array, lhs_sf: Array, rhs_q: Array, rhs_sf: Array, group_ends: Array, out_dtype: str = "bfloat16"
) -> Array:
    """lhs (M, K) x rhs_t (G, N, K), both MXFP8 along K -> out (M, N); rows past the last end are zeros."""
    return m_grouped(dequantize64(lhs_q, lhs_sf), dequantize64(rhs_q, rhs_sf), group_ends, out_dtype)


def grouped_mm_bf16(lhs: Array, rhs_t: Array, group_ends: Array, out_dtype: str = "bfloat16") -> Array:
    """lhs (M, K) x rhs_t (G, N, K), both bf16 -> out (M, N); rows past the last end are zeros."""
    return m_grouped(lhs, rhs_t, group_ends, out_dtype)


def grouped_wgrad_mx(
    lhs_q: Array, lhs_sf: Array, rhs_q: Array, rhs_sf: Array, group_ends: Array, out_dtype: str = "bfloat16"
) -> Array:
    """lhs_t (N, M) x rhs_t (K, M), both MXFP8 along M -> out (G, N, K); an empty group gives zeros."""
    return k_grouped(dequantize64(lhs_q, lhs_sf).T, dequantize64(rhs_q, rhs_sf).T, group_ends, out_dtype)


def grouped_wgrad_bf16(lhs: Array, rhs: Array, group_ends: Array, out_dtype: str = "bfloat16") -> Array:
    """lhs (M, N) x rhs (M, K), both bf16 -> out (G, N, K); an empty group gives zeros."""
    return k_grouped(lhs, rhs, group_ends, out_dtype)


def grouped_wgrad_bf16_t(lhs_t: Array, rhs_t: Array, group_ends: Array, out_dtype: str = "bfloat16") -> Array:
    """`grouped_wgrad_bf16` of lhs_t (N, M) and rhs_t (K, M)."""
    return k_grouped(lhs_t.T, rhs_t.T, group_ends, out_dtype)
