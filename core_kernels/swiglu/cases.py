"""Cases of the family `swiglu`."""

import numpy as np

from ..cases import F32, Array, Arrays, Case, N, Rng, exp2, finite, floats

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


def _of(make, *ops: str, name: str = "", **options: float) -> dict[str, Case]:
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
    **_of(lambda *of: unweighted(forward(*of)), "swiglu", "swiglu_row_fold", name="_unweighted"),
    **_of(lambda *of: unweighted(backward(*of)), "swiglu_bwd", "swiglu_bwd_all", name="_unweighted"),
    **_of(lambda *of: (*backward(*of), ends_of_chains(*of)), _FOLD),
    **_of(lambda *of: (*backward(*of), ends_of_chains(*of)), _FOLD, name="_clamped", **FLOOR, **CLAMPED),
    **_of(lambda *of: (*unweighted(backward(*of)), ends_of_chains(*of)), _FOLD, name="_unweighted"),
    **_of(wide, _FOLD, name="_wide"),
    **_of(beyond, _FOLD, name="_beyond"),
}
