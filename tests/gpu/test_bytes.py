"""torch and JAX write the same bytes. CUDA C++ and Triton write the same bytes."""

import numpy as np
import pytest
from mxep import cpp_bindings, jax_frontend, torch_frontend

from .cases import CASES, as_bytes, same_bytes

# Grouped GEMMs have an error bound instead (tests/conformance), because their summation order may differ.
BITWISE = [n for n, case in CASES.items() if case.op in cpp_bindings.CUDA_OPS and not case.op.startswith("grouped")]


@pytest.mark.parametrize("name", CASES)
def test_torch_and_jax_give_the_same_bytes(name: str) -> None:
    case = CASES[name]
    for seed in range(2):
        inputs = case.inputs(seed)
        same_bytes(case.specified(inputs, case.torch(*inputs)), case.specified(inputs, case.jax(*inputs)))


@pytest.mark.parametrize("frontend", [torch_frontend, jax_frontend], ids=["torch", "jax"])
@pytest.mark.parametrize("name", BITWISE)
def test_cuda_and_triton_give_the_same_bytes(name: str, frontend) -> None:
    case = CASES[name]
    run = case.torch if frontend is torch_frontend else case.jax
    for m in (96, 1024, 100_000, *case.edges):
        inputs = case.inputs(m=m)
        with frontend.force_implementation("cuda"):
            cuda = case.specified(inputs, run(*inputs, m=m))
        with frontend.force_implementation("triton"):
            triton = case.specified(inputs, run(*inputs, m=m))
        if case.op.startswith("swiglu_bwd") and inputs[3].numel():
            *cuda, dprob = cuda
            *triton, other_dprob = triton
            _same_sums(dprob, other_dprob, *inputs[:3], case.options_of(m).get("offset", 0.0))
        same_bytes(cuda, triton)


def _same_sums(got, want, dh, gate, up, offset: float) -> None:
    """The summation order of dprob = sum(dh * silu(gate) * (up + offset)) is free. The bound uses
    |silu(gate)| <= |gate|,
    also of clamped values."""
    got, want = (as_bytes(x).view(np.float32) for x in (got, want))
    dh, gate, up = (x[: len(got)] for x in (dh, gate, up))
    terms = dh.double() * gate.double() * (up.double().abs() + offset)
    bound = dh.shape[-1] * 2.0**-23 * terms.abs().sum(-1).cpu().numpy()
    finite = np.isfinite(bound)
    assert np.all(np.abs(got[finite] - want[finite]) <= bound[finite])
