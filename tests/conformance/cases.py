"""The inputs that every backend sees. numpy arrays, built once, from fixed seeds.

QUANTIZE   name -> x            floats in, bytes out; the last two dims are multiples of 32 unless `ROW_ONLY`
MAPS       name -> RowMap       counts of tokens per (rank, local expert), and the buffer they lie in
SORTS      name -> expert ids
GEMMS      name -> Gemm         a grouped product with its group ends
"""

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from mxep.core_kernels import oracle, oracle_layer
from mxep.core_kernels.formats import BLOCK
from mxep.core_kernels.recipe import RECIPES

BF16 = np.dtype(ml_dtypes.bfloat16)
Array = np.ndarray


def seeded(name: str) -> np.random.Generator:
    return np.random.default_rng(list(name.encode()))


# --- the five distributions of the numerics contract ------------------------------------------------


def normal(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    return rng.standard_normal(shape)


def swiglu(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """What the second expert matrix reads: silu(gate) * up of two normals."""
    gate, up = rng.standard_normal((2, *shape))
    return gate / (1 + np.exp(-gate)) * up


def hot_columns(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """One column in a hundred is a hundred times larger."""
    return normal(rng, shape) * np.where(rng.random(shape[-1]) < 0.01, 100, 1)


def student_t(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    return rng.standard_t(2, shape)


def lognormal_blocks(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Block magnitudes spread by three octaves (one standard deviation)."""
    octaves = 3 * rng.standard_normal((*shape[:-1], shape[-1] // BLOCK))
    return normal(rng, shape) * np.repeat(np.exp2(octaves), BLOCK, axis=-1)


DISTRIBUTIONS = {f.__name__: f for f in (normal, swiglu, hot_columns, student_t, lognormal_blocks)}


# --- quantize -----------------------------------------------------------------------------------------


def _fp32(bits: Array) -> Array:
    return np.asarray(bits, np.uint32).view(np.float32)


def _quantize_cases() -> dict[str, Array]:
    shape = (64, 160)
    cases = {name: f(seeded(name), shape).astype(BF16) for name, f in DISTRIBUTIONS.items()}
    cases["normal_fp32"] = normal(seeded("fp32"), shape).astype(np.float32)
    cases["large_fp32"] = lognormal_blocks(seeded("large"), (96, 544)).astype(np.float32)
    cases["three_dims"] = student_t(seeded("3d"), (3, 64, 96)).astype(BF16)

    patterns = np.arange(2**16, dtype=np.uint16)
    cases["all_bf16"] = patterns.view(BF16).reshape(512, 128)  # a block holds 32 neighbours of one exponent
    cases["all_bf16_shuffled"] = seeded("shuffle").permutation(patterns).view(BF16).reshape(512, 128)
    cases["random_bits_fp32"] = _fp32(seeded("bits").integers(0, 2**32, (64, 64), np.uint32))

    # every scale at and beside its edge, 448 * 2^k and 2^k, one block each
    for name, top in (("rceil_edges", 448.0), ("floor_edges", 1.0)):
        edges = np.ldexp(np.float32(top), np.arange(-157, 119)).astype(np.float32)
        edges = np.nextafter(np.stack([edges] * 3), np.float32([[-np.inf], [0], [np.inf]])).reshape(-1)[:800]
        edges[1::3] = np.abs(edges[1::3])
        x = edges[:, None] * seeded(name).uniform(-1, 1, (800, BLOCK)).astype(np.float32)
        x[:, 5] = -edges
        cases[name] = x.reshape(32, 800)

    signs = np.where(seeded("signs").random((32, 64)) < 0.5, -1.0, 1.0).astype(np.float32)
    cases["signed_zeros"] = 0 * signs
    cases["fp32_subnormals"] = _fp32(seeded("subnormal").integers(1, 2**23, (32, 64), np.uint32)) * signs
    cases["smallest_subnormals"] = _fp32(seeded("smallest").integers(0, 4, (32, 64), np.uint32)) * signs
    cases["bf16_subnormals"] = seeded("bf16").integers(0, 2**7, (32, 64)).astype(np.uint16).view(BF16)
    cases["largest_finite"] = np.float32(3.4028235e38) * signs
    cases["element_subnormals"] = np.float32(2.0**-17) * seeded("elements").uniform(-1, 1, (32, 64)).astype(np.float32)
    cases["element_subnormals"][:, ::BLOCK] = 1  # so that the rest of a block falls below 2^-6 of its scale

    for name, bad in (("nan_row", np.nan), ("inf_row", np.inf), ("minus_inf_row", -np.inf)):
        x = normal(seeded(name), (64, 96)).astype(np.float32)
        x[7, 40] = bad
        cases[name] = x.astype(BF16)
    cases["nan_signs_and_inf"] = normal(seeded("ns"), (32, 64)).astype(np.float32)
    cases["nan_signs_and_inf"][0, :3] = _fp32([0xFFC00001, 0x7FA00000, 0x7F800000])
    cases["zero_rows"] = np.zeros((0, 64), BF16)
    cases["one_block"] = normal(seeded("block"), (32, 32)).astype(np.float32)
    return cases


def _row_only_cases() -> dict[str, Array]:
    return {
        "one_token": normal(seeded("token"), (1, 64)).astype(BF16),
        "odd_rows": normal(seeded("odd"), (37, 96)).astype(BF16),
        "odd_rows_three_dims": normal(seeded("odd3"), (2, 5, 32)).astype(np.float32),
    }


ROW_ONLY = _row_only_cases()
QUANTIZE = _quantize_cases() | ROW_ONLY


# --- routing --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RowMap:
    """counts[rank][local expert]; `rank_rows` 0: ranks follow each other, otherwise each has that many rows."""

    counts: tuple[tuple[int, ...], ...]
    alignment: int = BLOCK
    rank_rows: int = 0
    slack: int = 0

    @property
    def flat(self) -> Array:
        return np.array(self.counts, np.int32).reshape(-1)

    @property
    def num_rows(self) -> int:
        return self.rank_rows * len(self.counts) if self.rank_rows else int(self.flat.sum()) + self.slack

    @property
    def options(self) -> dict[str, int]:
        return {
            "num_rows": self.num_rows,
            "num_local_experts": len(self.counts[0]),
            "alignment": self.alignment,
            "rank_rows": self.rank_rows,
        }


MAPS = {
    "drawn_in_routing": RowMap(((2, 1), (1, 2))),
    "no_multiple_of_32": RowMap(((5, 40, 33), (64, 1, 7))),
    "empty_experts": RowMap(((0, 9, 0, 3), (0, 0, 0, 4))),
    "empty_rank": RowMap(((0, 0), (17, 20), (0, 0), (3, 40))),
    "one_hot_expert": RowMap(((0, 70, 0), (0, 90, 0))),
    "one_token": RowMap(((0, 0), (1, 0))),
    "no_tokens": RowMap(((0, 0), (0, 0))),
    "exact_groups": RowMap(((32, 64), (32, 0))),
    "alignment_128": RowMap(((5, 130), (129, 0)), alignment=128),
    "alignment_96": RowMap(((5, 130), (129, 0)), alignment=96),
    "one_rank_one_expert": RowMap(((45,),)),
    "slack_at_the_end": RowMap(((5, 6), (7, 0)), slack=13),
    "fixed_capacity": RowMap(((5, 6), (7, 0), (0, 0), (0, 16)), rank_rows=16),
    "fixed_capacity_full": RowMap(((8, 8), (0, 16)), rank_rows=16),
    "many_experts": RowMap(tuple(tuple(row) for row in seeded("many").integers(0, 9, (4, 16)).tolist())),
}

SORTS: dict[str, tuple[Array, int]] = {
    "random": (seeded("sort").integers(0, 8, 300).astype(np.int32), 8),
    "all_to_one": (np.full(70, 3, np.int32), 8),
    "one_token": (np.int32([2]), 4),
    "no_tokens": (np.int32([]), 4),
    "one_expert": (np.zeros(50, np.int32), 1),
    "reversed": (np.arange(40, dtype=np.int32)[::-1].copy() // 5, 8),
    "empty_experts": (seeded("gaps").choice(np.int32([1, 4, 6]), 100), 9),
    "many_experts": (seeded("256").integers(0, 256, 500).astype(np.int32), 256),
}


# --- grouped GEMM -----------------------------------------------------------------------------------------


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
    return Gemm(lhs.astype(BF16), rhs_t.astype(BF16), dout.astype(BF16), np.int32(ends))


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
}


# --- a whole layer ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layer:
    """x and dy (T, D), fp32 parameters; T is a multiple of 4, so that 1, 2 and 4 ranks can share the tokens."""

    x: Array
    dy: Array
    params: dict[str, Array]
    top_k: int
    score: str
    normalize: bool

    @property
    def routing(self) -> dict[str, Any]:
        return {"top_k": self.top_k, "score": self.score, "normalize": self.normalize}

    @property
    def num_experts(self) -> int:
        return len(self.params["router"])

    def reference(self) -> tuple[Array, dict[str, Array]]:
        """y and the gradients in fp64, nothing quantized."""
        arguments = self.params | self.routing
        grads = oracle_layer.moe_layer_vjp(self.dy, self.x, **arguments)
        names = ("x", "router", "w1", "w3", "w2")
        return oracle_layer.moe_layer(self.x, **arguments), dict(zip(names, grads, strict=True))


def _layer(
    name: str, tokens: int, bias: dict[int, float] | None = None, top_k: int = 2, score: str = "softmax"
) -> Layer:
    """`bias` adds to an expert's logits, through a feature of x that is one."""
    rng, dim, hidden, num_experts = seeded(name), 64, 96, 8
    x = rng.standard_normal((tokens, dim))
    x[:, 0] = 1
    params = {
        "router": rng.standard_normal((num_experts, dim)) / 4,
        "w1": rng.standard_normal((num_experts, hidden, dim)) / 8,
        "w3": rng.standard_normal((num_experts, hidden, dim)) / 8,
        "w2": rng.standard_normal((num_experts, dim, hidden)) / 10,
    }
    for expert, value in (bias or {}).items():
        params["router"][expert, 0] = value
    single = {key: value.astype(np.float32) for key, value in params.items()}
    return Layer(x.astype(np.float32), rng.standard_normal(x.shape).astype(np.float32), single, top_k, score, top_k > 1)


LAYERS = {
    "softmax": _layer("softmax", 96),
    "one_hot_expert": _layer("hot_expert", 96, bias={3: 15.0}),
    "empty_rank": _layer("empty_rank", 96, bias={4: -30.0, 5: -30.0, 6: -30.0, 7: -30.0}),  # 1 of 2 ranks, 2 of 4
    "one_token_per_rank": _layer("one_token_each", 4),
    "one_expert_per_token": _layer("top1", 96, top_k=1, score="sigmoid"),  # not normalized: it would always weigh one
    "sigmoid": _layer("sigmoid", 96, score="sigmoid"),
}
# Every recipe where the layers share their shapes, the default one for the rest: JAX compiles each in seconds.
LAYER_RUNS = [
    (name, recipe)
    for name in LAYERS
    for recipe in RECIPES
    if name in ("softmax", "one_hot_expert", "empty_rank") or recipe == "mxfp8_wgrad_with_hp"
]


# --- four ranks -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Wire:
    """rows[r] (M_r, K) bf16 of rank r, splits[r][s] of which go to rank s."""

    rows: tuple[Array, ...]
    splits: tuple[tuple[int, ...], ...]

    def received(self) -> list[Array]:
        return oracle.all_to_all(self.rows, self.splits)


def _wire(name: str, splits: tuple[tuple[int, ...], ...]) -> Wire:
    rng = seeded(name)
    return Wire(tuple(lognormal_blocks(rng, (sum(row), 96)).astype(BF16) for row in splits), splits)


def _spoiled(case: Wire) -> Wire:
    """The same with a NaN, an infinity and fp32-subnormal values in three of its rows."""
    rows = [part.copy() for part in case.rows]
    rows[0][0, 5], rows[0][1, 40], rows[1][0] = np.nan, -np.inf, rows[1][0] * BF16.type(2.0**-130)
    return Wire(tuple(rows), case.splits)


WIRE = {
    "uneven": _wire("uneven", ((3, 0, 5, 9), (1, 1, 1, 1), (0, 0, 40, 0), (7, 33, 2, 0))),
    "a_rank_sends_nothing": _wire("sends_nothing", ((2, 3, 4, 5), (0, 0, 0, 0), (1, 0, 2, 0), (0, 6, 0, 1))),
    "a_rank_receives_nothing": _wire("receives_nothing", ((2, 0, 4, 5), (8, 0, 1, 1), (1, 0, 2, 0), (0, 0, 0, 1))),
    "one_row": _wire("one_row", ((0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 0, 0), (0, 0, 0, 0))),
    "nan_inf_and_subnormals": _spoiled(_wire("spoiled", ((3, 0, 5, 9), (1, 1, 1, 1), (0, 0, 40, 0), (7, 33, 2, 0)))),
}
