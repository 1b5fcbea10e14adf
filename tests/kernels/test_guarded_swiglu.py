"""SwiGLU between guards, in C++ and in Triton's interpreter: it reads and writes no byte outside of its arrays."""

import ml_dtypes
import numpy as np
import pytest
from mxep.core_kernels.swiglu import oracle
from mxep.core_kernels.swiglu import plan as swiglu

from ..compare import gemm_bound, same_bytes

SHAPES = {
    "": [(1, 1), (5, 37), (65, 100), (3, 0)],
    "_row": [(1, 32), (9, 96), (65, 544), (3, 0)],
    "_col": [(32, 1), (160, 37), (288, 544)],
    "_both": [(32, 32), (160, 96), (288, 544)],
}
FORWARD = [(f"swiglu{kind}", shape) for kind in ("", "_row", "_col") for shape in SHAPES[kind]]
BACKWARD = [(f"swiglu_bwd{kind}", shape) for kind, shapes in SHAPES.items() for shape in shapes]


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize(("op", "shape"), FORWARD + BACKWARD)
def test_swiglu(guarded_op, op, shape, weighted):
    rng = np.random.default_rng(shape)
    dh, gate, up = (rng.standard_normal(shape).astype(ml_dtypes.bfloat16) for _ in range(3))
    prob = rng.random(shape[0] * weighted).astype(np.float32)
    inputs = (dh, gate, up, prob) if "bwd" in op else (gate, up, prob)
    got, want = guarded_op(getattr(swiglu, op), *inputs), getattr(oracle, op)(*inputs)
    for g, w in zip(got, want if isinstance(want, tuple) else (want,), strict=True):
        if g.dtype == np.float32 and weighted:  # dprob, a sum in any order
            terms = oracle.dprob_terms(dh, gate, up).astype(np.float64)
            gemm_bound(g, terms.sum(-1), np.abs(terms).sum(-1), terms.shape[1])
        else:
            same_bytes(g, w)
