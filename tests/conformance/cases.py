"""The inputs of every backend: numpy arrays from fixed seeds, built once.

QUANTIZE   name -> x            floats in, bytes out; the last two dims are multiples of 32 unless `ROW_ONLY`
MAPS       name -> RowMap       counts of tokens per (rank, local expert), and the size of their buffer
SORTS      name -> expert ids
COMBINES   name -> Combine      rows, the slots they fill, probabilities
GLUS       name -> Glu          operands of SwiGLU and of its gradient
GEMMS      name -> Gemm         a grouped product with its group ends
SPANNED    name -> group ends   groups of several spans of 256 tokens
"""

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from mxep.core_kernels.formats import BLOCK

BF16 = np.dtype(ml_dtypes.bfloat16)
Array = np.ndarray


def seeded(name: str) -> np.random.Generator:
    return np.random.default_rng(list(name.encode()))


# --- the five distributions of the numerics contract ------------------------------------------------


def normal(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    return rng.standard_normal(shape)


def swiglu(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """silu(gate) * up of two normals, the operand of an expert's second product."""
    gate, up = rng.standard_normal((2, *shape))
    return gate / (1 + np.exp(-gate)) * up


def hot_columns(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """One column in a hundred is a hundred times larger."""
    return normal(rng, shape) * np.where(rng.random(shape[-1]) < 0.01, 100, 1)


def student_t(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    return rng.standard_t(2, shape)


def lognormal_blocks(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Log-normal block magnitudes, with a standard deviation of a factor of 8."""
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
    cases["all_bf16"] = patterns.view(BF16).reshape(512, 128)  # a block holds 32 consecutive values of one exponent
    cases["all_bf16_shuffled"] = seeded("shuffle").permutation(patterns).view(BF16).reshape(512, 128)
    cases["random_bits_fp32"] = _fp32(seeded("bits").integers(0, 2**32, (64, 64), np.uint32))

    # the fp32 values at and next to the edge of each scale, 448 * 2^k or 2^k, one block each
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
    """counts[rank][local expert]. rank_rows: rows of each rank's buffer; 0: the ranks' rows are contiguous."""

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


# --- combine ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Combine:
    """rows (R, D), NaN and infinity where `order` is -1; probs NaN where `slots` (T, K) is -1, or of shape (0,)."""

    rows: Array
    slots: Array
    order: Array
    probs: Array
    dy: Array

    @property
    def inputs(self) -> tuple[Array, ...]:
        return self.rows, self.slots, self.probs

    @property
    def bwd_inputs(self) -> tuple[Array, ...]:
        return self.dy, self.rows, self.slots, self.order, self.probs


def _combine(
    name: str, tokens: int, top_k: int, dim: int, *, empty: float = 0.0, padding: int = 0,
    rows: np.dtype = BF16, dy: np.dtype = BF16, weighted: bool = True,
) -> Combine:  # fmt: skip
    """`empty` of the slots have no row, `padding` of the rows no slot."""
    rng = seeded(name)
    filled = np.flatnonzero(rng.random(tokens * top_k) >= empty)
    order = rng.permutation(np.concatenate([filled, np.full(padding, -1)])).astype(np.int32)
    slots = np.full(tokens * top_k, -1, np.int32)
    slots[order[order >= 0]] = np.flatnonzero(order >= 0)
    x = student_t(rng, (len(order), dim))
    x[order < 0] = rng.choice([np.nan, np.inf], (padding, 1))
    probs = np.where(slots < 0, np.nan, rng.random(slots.shape)).astype(np.float32)
    shape = (tokens, top_k)
    return Combine(
        x.astype(rows), slots.reshape(shape), order, probs.reshape(shape) if weighted else np.zeros(0, np.float32),
        student_t(rng, (tokens, dim)).astype(dy),
    )  # fmt: skip


def _combine_cases() -> dict[str, Combine]:
    fp32 = np.dtype(np.float32)
    cases = {
        "top_1": _combine("top_1", 70, 1, 64),
        "top_8": _combine("top_8", 37, 8, 160),
        "top_3_of_odd_width": _combine("top_3", 37, 3, 33),
        "top_11": _combine("top_11", 5, 11, 40),
        "padding": _combine("padding", 40, 6, 72, empty=0.3, padding=77),
        "fp32": _combine("fp32", 40, 6, 72, empty=0.3, padding=77, rows=fp32, dy=fp32),
        "bf16_rows_fp32_gradient": _combine("mixed", 40, 6, 72, empty=0.3, padding=77, dy=fp32),
        "fp32_rows_bf16_gradient": _combine("mixed too", 40, 6, 72, padding=77, rows=fp32),
        "unweighted": _combine("unweighted", 40, 6, 72, empty=0.3, padding=77, weighted=False),
        "unweighted_fp32": _combine("plain", 40, 6, 72, rows=fp32, dy=fp32, weighted=False),
        "no_tokens": _combine("no_tokens", 0, 8, 64, padding=9),
        "no_rows": _combine("no_rows", 9, 8, 64, empty=1.0),
        "one_of_everything": _combine("one", 1, 1, 1),
        "more_columns_than_a_tile": _combine("columns", 3, 2, 1500, padding=2),
    }
    special = _combine("special", 40, 4, 64, empty=0.3)
    x, p, dy = special.rows, special.probs, special.dy
    x[0, 5], x[1, :9], x[2] = np.nan, np.inf, BF16.type(2.0**-133)
    dy[3, 4], dy[4, :7], dy[5] = np.nan, -np.inf, BF16.type(2.0**-130)
    p[6], p[7], p[8], p[9], p[10] = 0.0, -0.0, -1.5, 2.0**-140, 3e38
    return cases | {"nan_inf_and_subnormals": Combine(x, special.slots, special.order, p, dy)}


COMBINES = _combine_cases()


# --- SwiGLU ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Glu:
    """dh, gate, up (M, F) bf16; prob (M,) fp32, or (0,)."""

    dh: Array
    gate: Array
    up: Array
    prob: Array

    @property
    def forward(self) -> tuple[Array, Array, Array]:
        return self.gate, self.up, self.prob

    @property
    def backward(self) -> tuple[Array, Array, Array, Array]:
        return self.dh, *self.forward


def _glu(name: str, shape: tuple[int, int], weighted: bool, draw: Any = normal, gate: Array | None = None) -> Glu:
    rng = seeded(f"glu {name}")
    dh, drawn, up = (draw(rng, shape).astype(BF16) for _ in range(3))
    prob = rng.random(shape[0] if weighted else 0).astype(np.float32)
    return Glu(dh, drawn if gate is None else gate, up, prob)


def _glu_cases() -> dict[str, Glu]:
    gates = np.arange(2**16, dtype=np.uint16).view(BF16)
    shuffled = seeded("gates").permutation(gates).reshape(256, 256)
    cases = {
        "normal": _glu("normal", (64, 160), True),
        "without_prob": _glu("without_prob", (64, 160), False),
        "large": _glu("large", (288, 544), True, student_t),
        "lognormal_blocks": _glu("lognormal_blocks", (96, 96), False, lognormal_blocks),
        # a row holds consecutive gates of one exponent; dh and up are small, so that only the gate overflows
        "all_gates": _glu("all_gates", (512, 128), True, lambda *a: normal(*a) / 64, gates.reshape(512, 128)),
        "all_gates_shuffled": _glu("all_gates_shuffled", (256, 256), False, normal, shuffled),
        "one_block": _glu("one_block", (32, 32), True),
        "no_rows": _glu("no_rows", (0, 64), True),
        "no_rows_without_prob": _glu("no_rows_without_prob", (0, 64), False),
    }
    cases["ones"] = Glu(*(np.ones((32, 64), BF16),) * 3, np.float32([]))

    # all 12^3 triples of dh, gate, up, each in a row of its own; special values of prob too
    special = np.array([0, -0.0, 1, -1, 3e38, -3e38, 1e-40, -1e-40, 88, np.inf, -np.inf, np.nan], BF16)
    triples = [x.reshape(-1) for x in np.meshgrid(special, special, special, indexing="ij")]
    one_per_row = [np.repeat(x[:, None], 32, axis=1) for x in triples]  # a sum of one kind of term
    probs = np.resize(np.float32([1, 0, -0.0, -2.5, 1e-42, 3e38, np.inf, np.nan]), len(one_per_row[0]))
    cases["special_values"] = Glu(*one_per_row, probs)
    cases["special_values_without_prob"] = Glu(*one_per_row, np.float32([]))

    # all pairs of gate and up on both sides of a limit of 7, each in a row of its own
    edges = np.array([7, 7.03125, 6.96875, -7, -7.03125, -6.96875, 0, -0.0, 1, -100, np.inf, -np.inf, np.nan], BF16)
    gate, up = (np.resize(np.repeat(x.reshape(-1, 1), 32, axis=1), (192, 32)) for x in np.meshgrid(edges, edges))
    drawn = _glu("limit_of_7", gate.shape, True)
    cases["limit_of_7"] = Glu(drawn.dh, gate, up, drawn.prob)
    return cases


NUMBERS = {
    "gpt_oss": {"alpha": 1.702, "limit": 7.0, "offset": 1.0},
    "limit_alone": {"limit": 7.0},
    "steep": {"alpha": 64.0},
    "flat": {"alpha": 1 / 64, "limit": 30.0, "offset": -0.5},
}
"""alpha, limit and offset of SwiGLU."""
RAGGED_GLUS = {
    "one_token": _glu("one_token", (1, 64), True),
    "odd_rows": _glu("odd_rows", (37, 96), True),
    "odd_rows_without_prob": _glu("odd_rows_without_prob", (37, 96), False),
}
"""M is not a multiple of 32: no scales along columns."""
ODD_GLUS = {"odd_width": _glu("odd_width", (5, 37), True), "no_columns": _glu("no_columns", (3, 0), True)}
"""Neither M nor F is a multiple of 32: bf16 out alone."""
UNALIGNED_GLUS = {f"rows_of_{width}": _glu(f"rows_of_{width}", (64, width), True) for width in (133, 134, 140)}
"""F is not a multiple of 32; rows start at multiples of 2, 4 and 8 bytes: bf16 out, or scales along columns."""
GLUS = _glu_cases() | RAGGED_GLUS | ODD_GLUS | UNALIGNED_GLUS


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
    "ragged_tiles": _gemm("ragged_tiles", [1, 1, 70, 203], 210, 160, 264),
}

SPANNED = {
    name: np.array(ends, np.int32)
    for name, ends in {
        "every_length": [0, 32, 256, 512, 800, 800, 1344],  # of a group: 0, 32, 224, 256, 288, 544 tokens, and slack
        "ends_between_spans": [96, 640, 1440],
        "one_group": [1440],
        "no_tokens": [0, 0],
        "no_group": [],
        "one_block_each": list(range(BLOCK, 1441, BLOCK)),
    }.items()
}
"""Group ends among 1440 tokens."""
