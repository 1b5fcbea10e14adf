"""Cases of the family `swiglu`."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..cases import (
    BF16,
    F32,
    MODES,
    Array,
    Arrays,
    Case,
    N,
    Rng,
    exp2,
    finite,
    fixed,
    floats,
    lognormal_blocks,
    normal,
    seeded,
    student_t,
    timed,
)

CLAMPED = {"alpha": 1.702, "limit": 1.0, "offset": 1.0}
FLOOR = {"rounding": 1, "satfinite": True}
CHAINS = 128
"""As many groups as `swiglu_bwd_fold` takes with any number of rows."""


def backward(rng: Rng, m: int) -> Arrays:
    return *(floats(rng, m, N) for _ in range(3)), rng.random(m, F32)


def forward(rng: Rng, m: int) -> Arrays:
    return *(floats(rng, m, N) for _ in range(2)), rng.random(m, F32)


def unweighted(arrays: Arrays) -> Arrays:
    return *arrays[:-1], np.zeros(0, F32)


def ends_of_chains(rng: Rng, m: int) -> Array:
    """The last may end before the last row."""
    return np.sort(rng.integers(0, m // 32 + 1, CHAINS)).astype(np.int32) * np.int32(32)


def wide(rng: Rng, m: int) -> Arrays:
    """Eight tiles and a half; 69 groups, some of more than one span."""
    dh, gate, up = (floats(rng, m, 544) for _ in range(3))
    blocks = rng.integers(0, 10, 69).cumsum().clip(max=m // 32 - m // 256)
    return dh, gate, up, rng.random(m, F32), blocks.astype(np.int32) * np.int32(32)


def beyond(rng: Rng, m: int) -> Arrays:
    """Most rows of dgate and dup have a larger block beyond their first 256 values."""
    dh, gate, up = (finite(rng, m, 544) for _ in range(3))
    dh[:, 256:] = (dh[:, 256:] * exp2(rng.integers(0, 9, (m, 1)))).astype(dh.dtype)
    return dh, gate, up, rng.random(m, F32), ends_of_chains(rng, m)


def _of(make: Callable[[Rng, int], Arrays], *ops: str, name: str = "", **options: float) -> dict[str, Case]:
    return {
        f"{op}{name}": Case(op, make, options, 32 if op.endswith(("_col", "_both", "_all", "_bwd_fold")) else 1)
        for op in ops
    }


_FORWARD = tuple(f"swiglu{to}" for to in ("", "_row", "_row_fold", "_col"))
_BACKWARD = tuple(f"swiglu_bwd{to}" for to in ("", "_row", "_col", "_both", "_all"))
_FOLD = "swiglu_bwd_fold"
CASES = {
    **_of(forward, *_FORWARD),
    **_of(backward, *_BACKWARD),
    **_of(forward, *_FORWARD, name="_clamped", **CLAMPED),
    **_of(backward, *_BACKWARD, name="_clamped", **CLAMPED),
    **_of(forward, "swiglu_blockwise"),
    **_of(backward, "swiglu_blockwise_bwd"),
    **_of(backward, "swiglu_blockwise_bwd", name="_clamped", power_of_two=True, **CLAMPED),
    **_of(forward, "swiglu_blockwise", name="_clamped", power_of_two=True, **CLAMPED),
    **_of(lambda *of: unweighted(forward(*of)), "swiglu", "swiglu_row_fold", name="_unweighted"),
    **_of(lambda *of: unweighted(backward(*of)), "swiglu_bwd", "swiglu_bwd_all", name="_unweighted"),
    **_of(lambda *of: (*backward(*of), ends_of_chains(*of)), _FOLD),
    **_of(lambda *of: (*backward(*of), ends_of_chains(*of)), _FOLD, name="_clamped", **FLOOR, **CLAMPED),
    **_of(lambda *of: (*unweighted(backward(*of)), ends_of_chains(*of)), _FOLD, name="_unweighted"),
    **_of(wide, _FOLD, name="_wide"),
    **_of(beyond, _FOLD, name="_beyond"),
}
TIMED = (
    *(timed(f"swiglu_{to}_fwd", "M F", f"swiglu_{to}") for to in ("row", "row_fold")),
    *(timed(f"swiglu_{to}_bwd", "M F", f"swiglu_bwd_{to}") for to in ("row", "both", "all")),
    timed("swiglu_fold_bwd", "M F G", "swiglu_bwd_fold"),
)


# --- fixed values ---------------------------------------------------------------------------------------


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


def _glu(name: str, shape: tuple[int, int], weighted: bool, draw: Callable = normal, gate: Array | None = None) -> Glu:
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
    one = np.ones((32, 64), BF16)
    cases["ones"] = Glu(one, one, one, np.array([], np.float32))

    # all 12^3 triples of dh, gate, up, each in a row of its own; special values of prob too
    special = np.array([0, -0.0, 1, -1, 3e38, -3e38, 1e-40, -1e-40, 88, np.inf, -np.inf, np.nan], BF16)
    triples = [x.reshape(-1) for x in np.meshgrid(special, special, special, indexing="ij")]
    dh, gate, up = [np.repeat(x[:, None], 32, axis=1) for x in triples]  # a sum of one kind of term
    probs = np.resize(np.array([1, 0, -0.0, -2.5, 1e-42, 3e38, np.inf, np.nan], np.float32), len(dh))
    cases["special_values"] = Glu(dh, gate, up, probs)
    cases["special_values_without_prob"] = Glu(dh, gate, up, np.array([], np.float32))

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

NOT_QUANTIZED = (
    dict.fromkeys(RAGGED_GLUS, ("_col", "_both", "_all"))
    | dict.fromkeys(ODD_GLUS, ("_row", "_row_fold", "_col", "_both", "_all"))
    | dict.fromkeys(UNALIGNED_GLUS, ("_row", "_row_fold", "_both", "_all"))
)


def _glu_case(op: str, name: str, **options: float) -> dict[str, Case]:
    inputs = GLUS[name].backward if "bwd" in op else GLUS[name].forward
    return {
        "-".join([op, name, *(f"{key}={value:.4g}" for key, value in options.items())]): fixed(op, *inputs, **options)
    }


def _conformance() -> dict[str, Case]:
    cases: dict[str, Case] = {}
    for op in _FORWARD + _BACKWARD:
        for name in GLUS:
            if not op.endswith(NOT_QUANTIZED.get(name, ())):
                cases |= _glu_case(op, name)
    every_kind = [(to, "limit_of_7") for to in ("", "_row", "_row_fold", "_col")]
    unaligned = [("", "odd_width"), *(("_col", name) for name in UNALIGNED_GLUS)]
    every_gate = ("_row", "all_gates_shuffled")
    for kind, numbers in NUMBERS.items():
        for to, name in [*every_kind, *unaligned, every_gate] if kind == "gpt_oss" else [every_gate, every_kind[0]]:
            back = "_all" if (to, name) == every_gate else to.removesuffix("_fold")
            cases |= _glu_case(f"swiglu{to}", name, **numbers) | _glu_case(f"swiglu_bwd{back}", name, **numbers)
    for powers in (False, True):
        for name in ("large", "all_gates", "special_values", "no_rows_without_prob", *ODD_GLUS):
            for op in ("swiglu_blockwise", "swiglu_blockwise_bwd"):
                cases |= _glu_case(op, name, power_of_two=powers)
    for op in ("swiglu_blockwise", "swiglu_blockwise_bwd"):
        cases |= _glu_case(op, "limit_of_7", **NUMBERS["gpt_oss"])
    clamped, nan = np.full((3, 32), 100, BF16), np.full(3, np.nan, F32)
    cases["swiglu_blockwise_bwd-clamped-nan_weight"] = fixed("swiglu_blockwise_bwd", *[clamped] * 3, nan, limit=7.0)
    for name in ("normal", "special_values"):
        for mode in MODES.values():
            for to in ("_row", "_row_fold", "_col", "_bwd_both", "_bwd_all"):
                cases |= _glu_case(f"swiglu{to}", name, **mode)
    return cases


CONFORMANCE = _conformance()
