"""A case of an op: seeded inputs in numpy, and options. Tests, frozen hashes and benchmarks run the same tables.

A family has its tables in cases.py. Arrays have the dtypes of the oracles: q and sf are uint8.

CASES         name -> Case     any seed and number of rows: the GPU tests
CONFORMANCE   name -> Case     fixed values, compared with the oracle on every backend
TIMED         of Timed         sizes of benchmarks, which draw 10^9 values on the device
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from .formats import BLOCK, Rounding

BF16, F32 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)
Array = np.ndarray
Arrays = tuple[Array, ...]
Rng = np.random.Generator
K, N, GROUPS = 160, 64, 3
"""Columns and groups of the cases that have any number of rows."""
MODES = {
    f"{rounding.name.lower()}{'_satfinite' * satfinite}": {"rounding": rounding, "satfinite": satfinite}
    for rounding in Rounding
    for satfinite in (False, True)
}
OUT_DTYPES = ("bfloat16", "float32")


@dataclass(frozen=True, eq=False)  # hashable: arrays and options are not
class Case:
    """make(rng, m) returns the inputs of `op`, in its order, with m rows; m is a multiple of `multiple`.

    options: of the call, or a function of m that returns them.
    """

    op: str
    make: Callable[[Rng, int], Arrays]
    options: Mapping[str, Any] | Callable[[int], Mapping[str, Any]] = field(default_factory=dict)
    multiple: int = 1

    def arrays(self, seed: int = 0, m: int = 96) -> Arrays:
        return tuple(map(np.ascontiguousarray, self.make(np.random.default_rng(seed), m)))

    def options_of(self, m: int = 96) -> dict[str, Any]:
        return dict(self.options(m) if callable(self.options) else self.options)


def fixed(op: str, *arrays: Array, **options: Any) -> Case:
    """A case of these arrays."""
    return Case(op, lambda rng, m: arrays, options)


def seeded(name: str) -> Rng:
    return np.random.default_rng(list(name.encode()))


# --- timed calls ----------------------------------------------------------------------------------------


class Layer(NamedTuple):
    """One rank's share of a Mixture-of-Experts layer. hiddens: the widths of SwiGLU."""

    tokens: int
    dim: int
    hiddens: tuple[int, ...]
    num_experts: int
    top_k: int
    local_experts: int

    @property
    def sizes(self) -> dict[str, int]:
        """By the names of recorded lines. N, F: the first width."""
        m, k, (n, *_), experts, top_k, g = self
        return {"M": m, "K": k, "N": n, "F": n, "G": g, "top_k": top_k, "experts": experts, "ranks": experts // g}


@dataclass(frozen=True)
class Timed:
    """A timed call.

    name: of its lines in benchmarks/results. ops: one op, or several as one program. sizes: names in `Layer.sizes`;
    with `words` they are the case of a line. options: of the sizes, those that are options of the op.
    """

    name: str
    ops: tuple[str, ...]
    sizes: tuple[str, ...]
    words: Mapping[str, str] = field(default_factory=dict)
    options: tuple[str, ...] = ()


def timed(name: str, sizes: str, op: str = "", options: str = "", **words: str) -> Timed:
    """Names are separated by spaces. op: the default is the name."""
    return Timed(name, tuple((op or name).split()), tuple(sizes.split()), words, tuple(options.split()))


TIMED_LAYER = Layer(131072, 7168, (2048, 5120), num_experts=256, top_k=8, local_experts=8)


# --- the five distributions of the numerics contract ------------------------------------------------


def normal(rng: Rng, shape: tuple[int, ...]) -> Array:
    return rng.standard_normal(shape)


def swiglu(rng: Rng, shape: tuple[int, ...]) -> Array:
    """silu(gate) * up of two normals, the operand of an expert's second product."""
    gate, up = rng.standard_normal((2, *shape))
    return gate / (1 + np.exp(-gate)) * up


def hot_columns(rng: Rng, shape: tuple[int, ...]) -> Array:
    """One column in a hundred is a hundred times larger."""
    return normal(rng, shape) * np.where(rng.random(shape[-1]) < 0.01, 100, 1)


def student_t(rng: Rng, shape: tuple[int, ...]) -> Array:
    return rng.standard_t(2, shape)


def lognormal_blocks(rng: Rng, shape: tuple[int, ...]) -> Array:
    """Log-normal block magnitudes, with a standard deviation of a factor of 8."""
    octaves = 3 * rng.standard_normal((*shape[:-1], shape[-1] // BLOCK))
    return normal(rng, shape) * np.repeat(np.exp2(octaves), BLOCK, axis=-1)


DISTRIBUTIONS = {f.__name__: f for f in (normal, swiglu, hot_columns, student_t, lognormal_blocks)}


# --- inputs with parts that a kernel could skip: rows past the last group, padding, an empty group --------


def exp2(x: Array) -> Array:
    """Computed in fp64: its last bit, which differs between CPUs, does not reach the fp32 result."""
    return np.exp2(x.astype(np.float64)).astype(F32)


def floats(rng: Rng, *shape: int, dtype: np.dtype = BF16) -> Array:
    """Normal values; every row has its own magnitude. One in 500 is NaN, infinite, zero or subnormal in fp32."""
    x = rng.standard_normal(shape, F32) * exp2(3 * rng.standard_normal((*shape[:-1], 1), F32))
    special = np.array([np.nan, np.inf, -np.inf, 2.0**-130, 0.0], np.float32)[rng.integers(0, 5, shape)]
    return np.where(rng.random(shape, F32) < 0.002, special, x).astype(dtype)


def finite(rng: Rng, *shape: int) -> Array:
    return rng.standard_normal(shape, F32).astype(BF16)


def group_ends(rng: Rng, m: int, multiple: int = 1) -> Array:
    """Ends of three groups. The second group is empty; the last may end before the last row."""
    first, last = sorted(rng.integers(0, m // multiple + 1, 2).tolist())
    return np.array([first, first, last], np.int32) * np.int32(multiple)


def row_map(rng: Rng, m: int) -> Array:
    """All rows in any order, and padding."""
    rows = np.concatenate([rng.permutation(m), np.full(9, -1)])
    return rows[rng.permutation(len(rows))].astype(np.int32)
