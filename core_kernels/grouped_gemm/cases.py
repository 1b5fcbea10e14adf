"""Cases of the family `grouped_gemm`."""

from collections.abc import Callable
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
    group_ends,
    seeded,
)
from ..fold.oracle import fold_groups, quantize_row_fold
from ..formats import BLOCK
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
}
