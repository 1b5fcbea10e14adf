"""Whether a grouped product is right, on the GPU in fp64: the bound of its sums, and the distance to another result.

Rows are sampled so that every tile is: each group's first and last, and some between, with all their columns.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import torch
from mxep.core_kernels.formats import BLOCK, SPAN
from torch import Tensor

from .formulas import scale
from .gpu_calls import EPS

Pair = tuple[Tensor, Tensor]
Error = dict[str, object]
EDGE, BETWEEN = 256, 512
SQNR_CHUNK = 1 << 26
# An FP8 tensor core of sm_90 may lose so much of sum|a||b|: tests/conformance/check.py derives it.
FP8_CHAIN = 2.0**-9
HALF_ULP = 2.0**-8  # of bf16, at most, relative to the value
# Rounding the exact product to bf16 costs 55 to 56 dB; sums kept within tensor cores alone left 51.
MIN_PRODUCT_DB = 54.0
LARGEST_DB = 200.0  # said of equal results: infinity is no number of JSON's


def values_of(q: Tensor, sf: Tensor) -> Tensor:
    """E4M3 q (..., K) with one scale per row, sf (...), or per block, sf (..., K/32) -> fp64."""
    scales = scale(sf if sf.ndim == q.ndim else sf[..., None]).double()
    elements = q.view(torch.float8_e4m3fn).float().double()
    return (elements.unflatten(-1, (scales.shape[-1], -1)) * scales[..., None]).flatten(-2)


def _sampled(start: int, end: int, device: torch.device) -> Tensor:
    rows = np.arange(start, end)
    if len(rows) > 2 * EDGE + BETWEEN:
        between = np.random.default_rng(start).choice(rows, BETWEEN)
        rows = np.unique(np.concatenate([rows[:EDGE], between, rows[-EDGE:]]))
    return torch.from_numpy(rows).to(device)


def _groups(ends: Tensor) -> Iterator[tuple[int, int, int]]:
    bounds = [0, *ends.tolist()]
    return ((g, start, end) for g, (start, end) in enumerate(pairwise(bounds)))


class _Sums:
    """Squares of the errors found and of the values, once every error was within its bound."""

    def __init__(self, chain: float) -> None:
        self.chain, self.noise, self.signal = chain, 0.0, 0.0

    def add(self, group: int, got: Tensor, a: Tensor, b: Tensor) -> None:
        """got is a (R, T) x b (C, T) -> (R, C) in bf16."""
        exact, magnitude, got = a @ b.T, a.abs() @ b.abs().T, got.double()
        bound = (EPS * a.shape[1] + self.chain) * magnitude + HALF_ULP * torch.maximum(exact.abs(), got.abs())
        error = (got - exact).abs()
        if wrong := int((~(error <= bound)).sum()):
            raise AssertionError(f"group {group}: {wrong} of {got.numel()} values are past the bound of their sums")
        self.noise += float(error.square().sum())
        self.signal += float(exact.square().sum())

    def result(self) -> Error:
        relative, db = math.sqrt(self.noise / self.signal), _db(self.signal, self.noise)
        if not db >= MIN_PRODUCT_DB:
            raise AssertionError(f"{db} dB from the exact product; expected {MIN_PRODUCT_DB} or more")
        return {"grade": "gemm_bound", "relative": float(f"{relative:.3g}"), "sqnr_db": db}


def rows_error(outputs: Sequence[Tensor], lhs: Pair, rhs: Pair, ends: Tensor, chain: float) -> Error:
    """Of lhs (M, K) x rhs (G, N, K) -> (M, N) bf16. Raises AssertionError past the bound."""
    sums = _Sums(chain)
    for group, start, end in _groups(ends):
        if start < end:
            rows = _sampled(start, end, ends.device)
            weights = values_of(rhs[0][group], rhs[1][group])
            sums.add(group, outputs[0][rows], values_of(lhs[0][rows], lhs[1][rows]), weights)
    return sums.result()


def wgrad_error(outputs: Sequence[Tensor], lhs: Pair, rhs: Pair, ends: Tensor, chain: float) -> Error:
    """Of lhs (N, M), (S, N) x rhs (K, M), (S, K) -> (G, N, K) bf16, an empty group's being zeros."""
    sums = _Sums(chain)
    n, k = (_sampled(0, len(q), ends.device) for q, _ in (lhs, rhs))
    for group, start, end in _groups(ends):
        got = outputs[0][group]
        if start == end and bool(got.any()):
            raise AssertionError(f"group {group}: no rows, and a weight gradient that is not zero")
        if start < end:
            # One scale per block of 32, of which a span has eight and its last one fewer.
            blocks = torch.arange(0, end - start, BLOCK, device=ends.device)
            slots = start // SPAN + group + blocks // SPAN
            a, b = (values_of(q[at, start:end], sf[slots][:, at].T) for at, (q, sf) in ((n, lhs), (k, rhs)))
            sums.add(group, got[n][:, k], a, b)
    return sums.result()


def _db(signal: float, noise: float) -> float:
    return round(min(10 * math.log10(signal / noise), LARGEST_DB), 1) if noise else LARGEST_DB


def sqnr_db(got: Sequence[Tensor], want: Sequence[Tensor], ends: Tensor) -> float:
    """The smallest over the outputs; (G, N, K) without its empty groups, where torch may leave anything."""
    owned = torch.diff(ends, prepend=ends.new_zeros(1)) > 0
    smallest = LARGEST_DB
    for a, b in zip(got, want, strict=True):
        if a.shape != b.shape:
            raise AssertionError(f"output: got shape {tuple(a.shape)}, the other is {tuple(b.shape)}")
        a, b = (x[owned] if x.ndim == 3 else x for x in (a, b))
        signal = noise = 0.0
        for x, y in zip(a.reshape(-1).split(SQNR_CHUNK), b.reshape(-1).split(SQNR_CHUNK), strict=True):
            x, y = x.double(), y.double()
            signal += float(y.square().sum())
            noise += float((x - y).square().sum())
        if not (math.isfinite(signal) and math.isfinite(noise) and signal):
            raise AssertionError(f"output of shape {tuple(a.shape)}: not finite, or zeros alone")
        smallest = min(smallest, _db(signal, noise))
    return smallest
