"""Whether a grouped product is right: the error bound of its sums, in fp64 on the device, and the SQNR of two results.

Sampled rows hit every tile: the first and last 256 of each group and 512 between them, with all columns.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import torch
from mxep.core_kernels.formats import BLOCK, SPAN
from torch import Tensor

from ..peers.formulas_torch import scale

Pair = tuple[Tensor, Tensor]
Error = dict[str, object]
EPS = 2.0**-23
EDGE, BETWEEN = 256, 512
SQNR_CHUNK = 1 << 26
# Share of sum|a||b| that an FP8 tensor core of sm_90 may lose; derived in tests/conformance/check.py.
FP8_CHAIN = 2.0**-9
HALF_ULP = 2.0**-8  # of bf16, at most, relative to the value
# An exact product rounded to bf16 has 55 to 56 dB; sums without promotion to fp32 had 51.
MIN_PRODUCT_DB = 54.0
LARGEST_DB = 200.0  # of equal results: JSON has no infinity


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
    """Sums of squared errors and squared values; every error must be within its bound."""

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
    """Error of lhs (M, K) x rhs (G, N, K) -> (M, N) bf16. Raises AssertionError past the bound."""
    sums = _Sums(chain)
    for group, start, end in _groups(ends):
        if start < end:
            rows = _sampled(start, end, ends.device)
            weights = values_of(rhs[0][group], rhs[1][group])
            sums.add(group, outputs[0][rows], values_of(lhs[0][rows], lhs[1][rows]), weights)
    return sums.result()


def wgrad_error(outputs: Sequence[Tensor], lhs: Pair, rhs: Pair, ends: Tensor, chain: float) -> Error:
    """Error of lhs (N, M), (S, N) x rhs (K, M), (S, K) -> (G, N, K) bf16; an empty group must be zeros."""
    sums = _Sums(chain)
    n, k = (_sampled(0, len(q), ends.device) for q, _ in (lhs, rhs))
    for group, start, end in _groups(ends):
        got = outputs[0][group]
        if start == end and bool(got.any()):
            raise AssertionError(f"group {group}: no rows, and a weight gradient that is not zero")
        if start < end:
            # One scale per block of 32 tokens; a chunk of 256 tokens has eight blocks, the last chunk of a group fewer.
            blocks = torch.arange(0, end - start, BLOCK, device=ends.device)
            slots = start // SPAN + group + blocks // SPAN
            a, b = (values_of(q[at, start:end], sf[slots][:, at].T) for at, (q, sf) in ((n, lhs), (k, rhs)))
            sums.add(group, got[n][:, k], a, b)
    return sums.result()


def _db(signal: float, noise: float) -> float:
    return round(min(10 * math.log10(signal / noise), LARGEST_DB), 1) if noise else LARGEST_DB


def sqnr_db(got: Sequence[Tensor], want: Sequence[Tensor], ends: Tensor) -> float:
    """The smallest SQNR of the outputs. Empty groups of (G, N, K) are left out: torch does not define them."""
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
            raise AssertionError(f"output of shape {tuple(a.shape)}: not finite, or all zeros")
        smallest = min(smallest, _db(signal, noise))
    return smallest
