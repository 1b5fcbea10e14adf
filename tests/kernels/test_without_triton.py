"""A machine without triton asks every op for its shapes, and trains a layer in C++ in both frontends."""

import subprocess
import sys
from pathlib import Path

import pytest

BLOCKED = "import sys; sys.modules['triton'] = None; sys.path.insert(0, {folder!r})\n"
SHAPES = """
from mxep.core_kernels.registry import OPS
from tests.cases import sample
for op in OPS.values():
    types, options = sample(op)
    assert len(op.signature(*types, **options).out) == len(op.outputs), op.name
    assert op.launch(*types, arch="sm_90", **options).num_warps
"""
NUMPY = """
import numpy as np
from mxep import cpp_bindings
from mxep.core_kernels.launch import ArrayType
from mxep.core_kernels.registry import OPS
x, op = np.full((1, 32), 448, np.float32), OPS["quantize_row"]
out, attrs, _ = op.signature(ArrayType(x.shape, x.dtype.name))
q, sf = (np.empty(a.shape, a.dtype) for a in out)
cpp_bindings.run(op.name, [x], [q, sf], list(attrs.values()))
assert (q[0, 0], sf[0, 0]) == (126, 127)
"""
TORCH = """
import torch
from mxep.torch_frontend import MoE, RouterConfig, capabilities, ops
q, sf = ops.quantize_row(torch.full((1, 32), 448.0))
assert (int(q[0, 0]), int(sf[0, 0])) == (126, 127)
layer = MoE(32, 64, 4, RouterConfig(top_k=2))
layer(torch.randn(5, 32))[0].sum().backward()
assert layer.experts.w1.grad.isfinite().all()
assert "triton is missing" in capabilities("cpu")["combine"][1]["triton"]
"""
JAX = """
import jax, jax.numpy as jnp
from mxep.jax_frontend import MoEConfig, RouterConfig, capabilities, moe, ops
q, sf = ops.quantize_row(jnp.full((1, 32), 448.0))
assert (int(q[0, 0]), int(sf[0, 0])) == (126, 127)
config = MoEConfig(dim=32, hidden_dim=64, num_experts=4, router=RouterConfig(top_k=2))
params, x = moe.init(jax.random.key(0), config), jax.random.normal(jax.random.key(1), (5, 32))
grads = jax.jit(jax.grad(lambda params: moe.apply(params, x, config)[0].sum()))(params)
assert all(jnp.isfinite(grad).all() for grad in jax.tree.leaves(grads))
assert capabilities("cpu")["combine"][0] == "cpp"
"""


@pytest.mark.parametrize("code", [SHAPES, NUMPY, TORCH, JAX], ids=["shapes", "numpy", "torch", "jax"])
def test_without_triton(code: str) -> None:
    script = BLOCKED.format(folder=str(Path(__file__).parents[2])) + code
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
