"""Cases of the family `grouped_gemm`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..cases import (
    BF16,
    DISTRIBUTIONS,
    F32,
    GROUPS,
    OUT_DTYPES,
    Array,
    Arrays,
    Case,
    K,
    N,
    Rng,
    finite,
    fixed,
    group_ends,
    seeded,
)
from ..fold.oracle import fold_groups, quantize_row_fold
from ..formats import BLOCK, E4M3_NAN, E8M0_BIAS, E8M0_NAN, spans
from ..quantize.oracle import quantize_col, quantize_row
from ..quantize.oracle_blockwise import quantize_blockwise, quantize_squares

WIDE = {"out_dtype": "float32"}


def ragged(rng: Rng, m: int) -> Array:
    """Unaligned ends. The first group has one row if m > 0."""
    return np.array([min(m, 1), max(min(m, 1), m // 3), m - m // 8], np.int32)


def mm(rng: Rng, m: int) -> Arrays:
    return finite(rng, m, K), finite(rng, GROUPS, N, K), group_ends(rng, m)


def kn(rng: Rng, m: int) -> Arrays:
    lhs, rhs_t, ends = mm(rng, m)
    return lhs, rhs_t.swapaxes(1, 2), ends


def kn_sum(rng: Rng, m: int) -> Arrays:
    *pair, ends = kn(rng, m)
    return *pair, *kn(rng, m)[:2], ends


def kn_tiles(rng: Rng, m: int) -> Arrays:
    """A contraction dim that is no multiple of a stage: a stage does not reach into the weights of the next group."""
    rhs = finite(rng, GROUPS, 200, 808)
    rhs[1:, :56] = np.nan
    return finite(rng, m, 200), rhs, np.full(3, m - m // 8, np.int32)


def mm_mx(rng: Rng, m: int) -> Arrays:
    lhs, rhs_t, ends = mm(rng, m)
    return *quantize_row(lhs), *quantize_row(rhs_t), ends


def wgrad_mx(rng: Rng, m: int) -> Arrays:
    return *quantize_col(finite(rng, m, N)), *quantize_col(finite(rng, m, K)), group_ends(rng, m, 32)


def mm_fold(rng: Rng, m: int) -> Arrays:
    lhs, rhs_t, ends = mm(rng, m)
    return *quantize_row_fold(lhs), *quantize_row_fold(rhs_t), ends


def mm_fold_bias(rng: Rng, m: int) -> Arrays:
    *operands, ends = mm_fold(rng, m)
    return *operands, rng.standard_normal((GROUPS, N), F32), ends


def mm_fold_sum(rng: Rng, m: int) -> Arrays:
    lhs, rhs_t = finite(rng, m, 2 * K), finite(rng, GROUPS, N, 2 * K)
    large, small = BF16.type(2.0**60), BF16.type(2.0**-60)
    operands = lhs[:, :K], rhs_t[..., :K], lhs[:, K:] * large, rhs_t[..., K:] * small
    return *(t for x in operands for t in quantize_row_fold(x)), group_ends(rng, m)


def mm_fold_pair(rng: Rng, m: int) -> Arrays:
    *operands, ends = mm_fold(rng, m)
    return *operands, *quantize_row_fold(finite(rng, GROUPS, N, K)), ends


def mm_fold_pair_tiles(rng: Rng, m: int) -> Arrays:
    operands = finite(rng, m, 416), finite(rng, GROUPS, 808, 416), finite(rng, GROUPS, 808, 416)
    return *(t for x in operands for t in quantize_row_fold(x)), ragged(rng, m)


def blockwise(rng: Rng, m: int) -> Arrays:
    lhs, rhs_t, ends = mm(rng, m)
    return *quantize_blockwise(lhs), *quantize_squares(rhs_t), ends


def blockwise_tiles(rng: Rng, m: int) -> Arrays:
    lhs, rhs_t = finite(rng, m, 416), finite(rng, GROUPS, 808, 416)
    return *quantize_blockwise(lhs), *quantize_squares(rhs_t), ragged(rng, m)


def blockwise_sum(rng: Rng, m: int) -> Arrays:
    *first, ends = blockwise(rng, m)
    return *first, *blockwise(rng, m)[:4], ends


def blockwise_sum_tiles(rng: Rng, m: int) -> Arrays:
    *first, ends = blockwise_tiles(rng, m)
    return *first, *blockwise_tiles(rng, m)[:4], ends


def by_group(x: Array, ends: Array) -> Arrays:
    return fold_groups(*quantize_col(x), ends)


def wgrad_fold(rng: Rng, m: int) -> Arrays:
    lhs, rhs, ends = finite(rng, m, N), finite(rng, m, K), group_ends(rng, m, 32)
    return *by_group(lhs, ends), *by_group(rhs, ends), ends


def wgrad_fold_pair(rng: Rng, m: int) -> Arrays:
    *operands, ends = wgrad_fold(rng, m)
    return *operands, *by_group(finite(rng, m, N), ends), ends


def wgrad_fold_pair_tiles(rng: Rng, m: int) -> Arrays:
    ends = group_ends(rng, m, 32)
    return *(t for n in (808, 328, 808) for t in by_group(finite(rng, m, n), ends)), ends


CASES = {
    "grouped_mm_mx": Case("grouped_mm_mx", mm_mx),
    "grouped_mm_bf16": Case("grouped_mm_bf16", mm),
    "grouped_wgrad_mx": Case("grouped_wgrad_mx", wgrad_mx, multiple=32),
    "grouped_wgrad_bf16": Case(
        "grouped_wgrad_bf16", lambda rng, m: (finite(rng, m, N), finite(rng, m, K), group_ends(rng, m))
    ),
    "grouped_wgrad_bf16_t": Case(
        "grouped_wgrad_bf16_t", lambda rng, m: (finite(rng, N, m), finite(rng, K, m), group_ends(rng, m)), multiple=32
    ),
    "grouped_mm_bf16_kn": Case("grouped_mm_bf16_kn", kn),
    "grouped_mm_bf16_kn_sum": Case("grouped_mm_bf16_kn_sum", kn_sum),
    "grouped_mm_bf16_kn_tiles": Case("grouped_mm_bf16_kn", kn_tiles, WIDE),
    "grouped_mm_bf16_tiles": Case(
        "grouped_mm_bf16", lambda rng, m: (finite(rng, m, 200), finite(rng, GROUPS, 808, 200), ragged(rng, m)), WIDE
    ),
    "grouped_wgrad_bf16_tiles": Case(
        "grouped_wgrad_bf16", lambda rng, m: (finite(rng, m, 808), finite(rng, m, 328), ragged(rng, m)), WIDE
    ),
    "grouped_wgrad_bf16_t_tiles": Case(
        "grouped_wgrad_bf16_t", lambda rng, m: (finite(rng, 808, m), finite(rng, 328, m), ragged(rng, m)), WIDE, 32
    ),
    "grouped_mm_fold": Case("grouped_mm_fold", mm_fold),
    "grouped_mm_fold_fp32": Case("grouped_mm_fold", mm_fold, WIDE),
    "grouped_mm_fold_bias": Case("grouped_mm_fold_bias", mm_fold_bias),
    "grouped_mm_fold_sum": Case("grouped_mm_fold_sum", mm_fold_sum),
    "grouped_mm_fold_sum_fp32": Case("grouped_mm_fold_sum", mm_fold_sum, WIDE),
    "grouped_mm_fold_bias_fp32": Case("grouped_mm_fold_bias", mm_fold_bias, WIDE),
    "grouped_mm_blockwise": Case("grouped_mm_blockwise", blockwise),
    "grouped_mm_blockwise_tiles": Case("grouped_mm_blockwise", blockwise_tiles, WIDE),
    "grouped_mm_blockwise_sum": Case("grouped_mm_blockwise_sum", blockwise_sum),
    "grouped_mm_blockwise_sum_tiles": Case("grouped_mm_blockwise_sum", blockwise_sum_tiles, WIDE),
    "grouped_mm_fold_pair": Case("grouped_mm_fold_pair", mm_fold_pair),
    "grouped_mm_fold_pair_tiles": Case("grouped_mm_fold_pair", mm_fold_pair_tiles, WIDE),
    "grouped_wgrad_fold": Case("grouped_wgrad_fold", wgrad_fold, multiple=32),
    "grouped_wgrad_fold_pair": Case("grouped_wgrad_fold_pair", wgrad_fold_pair, multiple=32),
    "grouped_wgrad_fold_pair_tiles": Case("grouped_wgrad_fold_pair", wgrad_fold_pair_tiles, WIDE, 32),
}


class Product(NamedTuple):
    """A timed linear layer of G experts, each N x K, on M rows in total."""

    M: int
    K: int
    N: int
    G: int
    routing: str = "balanced"

    @property
    def group_ends(self) -> Array:
        """(G,) multiples of 32. balanced: sizes differ by at most a fifth. skewed: the first group has half of all
        rows, the second none."""
        weights = np.random.default_rng(self.G).uniform(0.9, 1.1, self.G)
        if self.routing == "skewed":
            weights[1] = 0
            weights[0] = weights[2:].sum()
        ends = np.rint(weights.cumsum() / weights.sum() * (self.M // BLOCK)) * BLOCK
        return ends.astype(np.int32)


TIMED = (
    Product(131072, 7168, 2048, 8),
    Product(131072, 8192, 5120, 8),
    Product(131072, 2048, 1408, 8),
    Product(131072, 7168, 2048, 8, "skewed"),
)
"""The forward, both gradients, and autograd."""
TIMED_SMALL = tuple(Product(m, k, n, g) for k, n in ((7168, 2048), (2048, 1408)) for m, g in ((4096, 64), (512, 8)))
"""The forward alone, quantization of its rows included."""


# --- fixed values ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gemm:
    """lhs (M, K), rhs_t (G, N, K), dout (M, N) in bf16; rows past the last end hold NaN and infinity."""

    lhs: Array
    rhs_t: Array
    dout: Array
    group_ends: Array


def _gemm(name: str, ends: list[int], m: int, k: int, n: int, distribution: str = "normal") -> Gemm:
    rng, draw = seeded(name), DISTRIBUTIONS[distribution]
    lhs, rhs_t, dout = draw(rng, (m, k)), draw(rng, (len(ends), n, k)) / np.sqrt(k), draw(rng, (m, n))
    lhs[ends[-1] :: 2], lhs[ends[-1] + 1 :: 2] = np.nan, np.inf
    dout[ends[-1] :: 2], dout[ends[-1] + 1 :: 2] = np.inf, np.nan
    return Gemm(lhs.astype(BF16), rhs_t.astype(BF16), dout.astype(BF16), np.array(ends, np.int32))


def _gemm_cases() -> dict[str, Gemm]:
    cases = {name: _gemm(name, [64, 96], 96, 96, 64, name) for name in DISTRIBUTIONS}
    # one shape for all these, because JAX compiles each
    for name, ends in {
        "empty_experts": [0, 32, 32, 128, 128],
        "one_hot_expert": [0, 0, 128, 128, 128],
        "rows_past_the_end": [32, 32, 64, 64, 96],
        "every_row_past_the_end": [0, 0, 0, 0, 0],
        "nan_and_inf_in_one_row": [32, 64, 64, 96, 128],
    }.items():
        cases[name] = _gemm(name, ends, 128, 64, 32)
    nan = cases["nan_and_inf_in_one_row"]
    nan.lhs[3, 5], nan.lhs[40, 1], nan.dout[70, 2] = np.nan, np.inf, np.nan
    cases["one_group"] = _gemm("one", [32], 32, 32, 32)
    cases["no_rows"] = _gemm("none", [0, 0], 0, 64, 32)
    cases["wide"] = _gemm("wide", [32, 64], 64, 160, 288)
    return cases


GEMMS = _gemm_cases()
RAGGED_GEMMS = {
    "no_multiple_of_32": _gemm("ragged", [1, 34, 34, 77], 96, 64, 32),
    "one_token": _gemm("one_token", [0, 1], 1, 64, 32),
    "ragged_tiles": _gemm("ragged_tiles", [1, 1, 70, 203], 210, 160, 264),
}
M_GROUPED = GEMMS | RAGGED_GEMMS


def _rows(quantize: Callable[[Array], Arrays]) -> Callable[[str], Arrays]:
    return lambda name: (*quantize(M_GROUPED[name].lhs), *quantize(M_GROUPED[name].rhs_t), M_GROUPED[name].group_ends)


def _kn(name: str) -> Arrays:
    case = M_GROUPED[name]
    return case.lhs, case.rhs_t.swapaxes(1, 2), case.group_ends


def _kn_sum(name: str) -> Arrays:
    lhs, rhs, ends = _kn(name)
    return lhs, rhs, lhs[::-1], rhs[:, ::-1], ends


def _blockwise(name: str) -> Arrays:
    case = M_GROUPED[name]
    return *quantize_blockwise(case.lhs), *quantize_squares(case.rhs_t), case.group_ends


def _blockwise_sum(name: str) -> Arrays:
    """The second product has the rows and weights of the first in another order."""
    *first, ends = _blockwise(name)
    q, sf, w, w_sf = first
    return *first, q[::-1], sf[::-1], w[::-1], w_sf[::-1], ends


def _bias(name: str) -> Arrays:
    """The bias is a term of the sum; NaN of groups without rows."""
    *operands, ends = _rows(quantize_row_fold)(name)
    bias = (seeded(f"bias {name}").standard_normal(operands[3].shape) * 30).astype(F32)
    bias[np.diff(ends, prepend=0) == 0] = np.nan
    return *operands, bias, ends


def _sum(name: str, e: int) -> Arrays:
    """The second product has its own depth. Its rows are 2^e larger and its weights as much smaller."""
    case, rng = M_GROUPED[name], seeded(f"sum {name}")
    (groups, n, k), depth = case.rhs_t.shape, 3 * BLOCK
    lhs2 = (rng.standard_normal((len(case.lhs), depth)) * 2.0**e * np.sqrt(k / depth)).astype(BF16)
    rhs2 = (rng.standard_normal((groups, n, depth)) * 2.0**-e).astype(BF16)
    return *(t for x in (case.lhs, case.rhs_t, lhs2, rhs2) for t in quantize_row_fold(x)), case.group_ends


def _wgrad(name: str) -> Arrays:
    return M_GROUPED[name].dout, M_GROUPED[name].lhs, M_GROUPED[name].group_ends


def _wgrad_t(name: str) -> Arrays:
    dout, lhs, ends = _wgrad(name)
    return dout.T, lhs.T, ends


def _wgrad_mx(name: str) -> Arrays:
    dout, lhs, ends = _wgrad(name)
    return *quantize_col(dout), *quantize_col(lhs), ends


def _wgrad_fold(name: str) -> Arrays:
    dout, lhs, ends = _wgrad(name)
    return *by_group(dout, ends), *by_group(lhs, ends), ends


_MAKES: dict[str, Callable[..., Arrays]] = {
    "grouped_mm_bf16": _rows(lambda x: (x,)),
    "grouped_mm_bf16_kn": _kn,
    "grouped_mm_bf16_kn_sum": _kn_sum,
    "grouped_mm_mx": _rows(quantize_row),
    "grouped_mm_blockwise": _blockwise,
    "grouped_mm_blockwise_sum": _blockwise_sum,
    "grouped_mm_fold": _rows(quantize_row_fold),
    "grouped_mm_fold_bias": _bias,
    "grouped_wgrad_bf16": _wgrad,
    "grouped_wgrad_bf16_t": _wgrad_t,
    "grouped_wgrad_mx": _wgrad_mx,
    "grouped_wgrad_fold": _wgrad_fold,
}
# --- scales at both ends of their range -----------------------------------------------------------------
#
# A large scale of one side meets a small scale of the other side:
#
#     group    0       1       2       3       4
#     lhs      large   small   empty   large   small     large: bytes 222 to 254, elements below 2
#     rhs      small   large           small   large     small: bytes 0 to 32, elements from 2 on
#
# Products have scales of 2^-32 to 2^32. Each dequantized operand is a normal number in fp32 and in bf16: XLA's matmul
# on a CPU reads subnormal numbers as zeros. NaN scales have finite elements.

_LARGE, _SMALL = np.array([254, 253, 240, 222], np.uint8), np.array([0, 1, 14, 32], np.uint8)
_TWO = 0x40  # the E4M3 code of 2
_ENDS = np.array([32, 64, 64, 96, 128], np.int32)
_LARGE_GROUPS = np.array([True, False, False, True, False])  # of lhs; the others are large in rhs
_LARGE_ROWS = np.repeat(_LARGE_GROUPS, np.diff(_ENDS, prepend=0))


def _codes(rng: Rng, large: Array, shape: tuple[int, ...]) -> Array:
    magnitude = np.where(large, rng.integers(1, _TWO, shape), rng.integers(_TWO, E4M3_NAN, shape))
    return (magnitude | rng.integers(0, 2, shape) << 7).astype(np.uint8)


def _scales(large: Array, shape: tuple[int, ...], nan: Sequence[tuple[int, ...]]) -> Array:
    """nan: indices of the NaN scales."""
    i = np.indices(shape).sum(0) % len(_LARGE)
    sf = np.where(large, _LARGE[i], _SMALL[i])
    for at in nan:
        sf[at] = E8M0_NAN
    return sf


def _extreme_mm(name: str, blocks: tuple[int, ...] = (), second: bool = False) -> Arrays:
    """lhs (128, 64), rhs (5, 32, 64). blocks: () of one scale for each row, else the scales of a row. second: of a sum,
    where large and small sides are exchanged, and NaN scales are elsewhere."""
    rng, shift, groups = seeded(name), 2 * second, len(_ENDS)
    lhs, rhs = (_LARGE_ROWS ^ second)[:, None], ~(_LARGE_GROUPS ^ second)[:, None, None]
    first, last = (0,) * len(blocks), tuple(n - 1 for n in blocks)
    lhs_sf = _scales(lhs if blocks else lhs[:, 0], (128, *blocks), [(5 + shift, *last), (40 + shift, *first)])
    nan = [(0, 7 + shift, *last), (1, 9 + shift, *first)]
    rhs_sf = _scales(rhs if blocks else rhs[..., 0], (groups, 32, *blocks), nan)
    return _codes(rng, lhs, (128, 64)), lhs_sf, _codes(rng, rhs, (groups, 32, 64)), rhs_sf


def _extreme_blockwise(name: str, second: bool = False) -> Arrays:
    """fp32 scales from 2^-126 on. The scale of the weights of the fourth or the second group is NaN."""
    lhs, lhs_sf, rhs, _ = _extreme_mm(name, (1,), second)
    rhs_sf = _scales(~(_LARGE_GROUPS ^ second)[:, None, None], (len(_ENDS), 1, 1), [(1 if second else 3, 0, 0)])
    exponents = [np.maximum(sf.astype(np.int32), 1) - E8M0_BIAS for sf in (lhs_sf, rhs_sf)]
    numbers = [np.where(e == E8M0_NAN - E8M0_BIAS, np.nan, np.ldexp(1.0, e)).astype(F32) for e in exponents]
    return lhs, numbers[0], rhs, numbers[1]


def _extreme_wgrad(name: str, large: Array, slots: int, nan: bool) -> Arrays:
    """lhs (32, 128), rhs (64, 128) along the tokens, scales (32, slots) and (64, slots)."""
    rng, indices = seeded(name), [[(5, 0), (9, 1)], [(7, 0), (11, 1)]] if nan else [[], []]
    lhs = _codes(rng, _LARGE_ROWS, (32, 128)), _scales(large, (32, slots), indices[0])
    return *lhs, _codes(rng, ~_LARGE_ROWS, (64, 128)), _scales(~large, (64, slots), indices[1])


def _extreme_scales() -> dict[str, Arrays]:
    """Op -> its inputs. `fold_groups` writes no NaN scale, and has a slot of scales for each of these groups."""
    fold, blockwise = _extreme_mm("extreme fold"), _extreme_blockwise("extreme blockwise")
    bias = seeded("extreme bias").standard_normal((len(_ENDS), 32), F32)
    q, sf, q2, sf2 = _extreme_wgrad("extreme spans", _LARGE_GROUPS, spans(128, len(_ENDS)), nan=False)
    return {
        "grouped_mm_mx": (*_extreme_mm("extreme mx", (2,)), _ENDS),
        "grouped_mm_blockwise": (*blockwise, _ENDS),
        "grouped_mm_blockwise_sum": (*blockwise, *_extreme_blockwise("extreme blockwise sum", second=True), _ENDS),
        "grouped_mm_fold": (*fold, _ENDS),
        "grouped_mm_fold_bias": (*fold, bias, _ENDS),
        "grouped_mm_fold_sum": (*fold, *_extreme_mm("extreme sum", second=True), _ENDS),
        "grouped_wgrad_mx": (*_extreme_wgrad("extreme wgrad", _LARGE_ROWS[::BLOCK], 4, nan=True), _ENDS),
        "grouped_wgrad_fold": (q, sf.T, q2, sf2.T, _ENDS),
    }


CONFORMANCE = {
    **{
        f"{op}-{name}-{dtype}": Case(op, lambda *_, make=make, name=name: make(name), {"out_dtype": dtype})
        for op, make in _MAKES.items()
        for name in (GEMMS if op in ("grouped_wgrad_mx", "grouped_wgrad_fold") else M_GROUPED)
        for dtype in OUT_DTYPES
    },
    **{
        f"grouped_mm_fold_sum-{name}-{dtype}": Case(
            "grouped_mm_fold_sum", lambda *_, of=(name, octaves): _sum(*of), {"out_dtype": dtype}
        )
        for name in M_GROUPED
        for dtype, octaves in (("bfloat16", 0), ("float32", -60))
    },
    **{
        f"{op}-extreme_scales-{dtype}": fixed(op, *arrays, out_dtype=dtype)
        for op, arrays in _extreme_scales().items()
        for dtype in OUT_DTYPES
    },
}
