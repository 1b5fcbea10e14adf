"""Cases of a dense layer, and what its results are compared with: fp64 sums of the operands of the definition.

CASES   name -> Linear                  RUN_CASES   (name, name of a run of layers.py) that are run on every backend
"""

from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from mxep.core_kernels.cases import BF16, Array, seeded
from mxep.core_kernels.formats import BLOCK
from mxep.core_kernels.reference import products

from .layers import RUNS


class Bound(NamedTuple):
    """An exact sum, the sum of its terms' magnitudes, and how many terms there are."""

    exact: Array
    magnitude: Array
    terms: int


@dataclass(frozen=True, eq=False)  # hashable: the references of a case are computed once
class Linear:
    """x (..., K), w (N, K), dout (..., N), and bias (N,) if there is one, of one dtype."""

    x: Array
    w: Array
    bias: Array | None
    dout: Array

    def bounds(self, run: str) -> dict[str, Bound]:
        """ "out" and the gradients of "x", "w" and of "bias" if there is one."""
        return _bounds(self, run)


@cache
def _bounds(case: Linear, run: str) -> dict[str, Bound]:
    recipe = RUNS[run]
    x, dout, w = case.x.reshape(-1, case.x.shape[-1]), case.dout.reshape(-1, case.dout.shape[-1]), case.w
    (rows, k), n, extra = x.shape, len(w), 4 if recipe.operands == "fp8_blockwise" else 0
    common: dict[str, Any] = {"form": recipe.form("cpu"), "rounding": recipe.rounding, "out_dtype": "float64"}
    pad = (-rows % BLOCK if recipe.wgrad_mx else 0, 0)
    padded_x, padded_dout = (np.pad(of, ((0, pad[0]), (0, 0))) for of in (x, dout))
    every, every_padded = np.array([rows], np.int32), np.array([rows + pad[0]], np.int32)

    def gradients(dout: Array, x: Array, w: Array) -> tuple[Array, Array]:
        dx, dw = products.grouped_mm_vjp(dout, x, w.T[None], every_padded, wgrad_mx=recipe.wgrad_mx, **common)
        return dx[:rows], dw[0].T

    def both(function: Any, *given: Array) -> list[tuple[Array, Array]]:
        """The results, and the results of magnitudes: an operand of |x| is the magnitude of the operand of x."""
        exact, magnitude = function(*given), function(*map(np.abs, given))
        return list(zip(exact, magnitude, strict=True))

    ((out, out_of),) = both(lambda x, w: (products.grouped_mm(x, w.T[None], every, **common),), x, w)
    (dx, dx_of), (dw, dw_of) = both(gradients, padded_dout, padded_x, w)
    bias = np.zeros(n) if case.bias is None else case.bias.astype(np.float64)
    shape = case.x.shape[:-1]
    bounds = {
        "out": Bound((out + bias).reshape(*shape, n), (out_of + np.abs(bias)).reshape(*shape, n), k + 1 + extra),
        "x": Bound(dx.reshape(case.x.shape), dx_of.reshape(case.x.shape), n + extra),
        "w": Bound(dw, dw_of, rows),
    }
    if case.bias is not None:
        of = dout.astype(np.float64)
        bounds["bias"] = Bound(of.sum(0), np.abs(of).sum(0), rows)
    return bounds


def _linear(
    name: str, leading: tuple[int, ...], bias: bool, dtype: str = "bfloat16", k: int = 64, n: int = 96
) -> Linear:
    """Values over a factor of 16, so that the scales of blocks differ. fp32 values are no bf16 values."""
    rng, kind = seeded(f"linear/{name}"), BF16 if dtype == "bfloat16" else np.float32
    shapes = (*leading, k), (n, k), (n,), (*leading, n)
    x, w, b, dout = ((rng.standard_normal(shape) * 2.0 ** rng.integers(-2, 3, shape)).astype(kind) for shape in shapes)
    return Linear(x, w, b if bias else None, dout)


CASES = {
    "none": _linear("none", (0,), True),
    "one": _linear("one", (1,), False),
    "block": _linear("block", (2, 16), True),
    "block_and_one": _linear("block_and_one", (3, 11), True),
    "float32": _linear("float32", (33,), True, "float32"),
    "spans": _linear("spans", (4096,), True),
}
"""By the number of rows. "spans" has 16 spans of 256 tokens."""
RUN_CASES = [
    *(("block_and_one", run) for run in RUNS),
    *((name, "mxfp8_folded") for name in CASES if name != "block_and_one"),
    ("float32", "mxfp8"),
]
"""All recipes with a number of rows that no block divides; all numbers of rows with the recipe of Hopper."""
