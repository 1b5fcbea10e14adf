"""CUDA C++ kernels: which ops run them, agreement with Triton, and first calls inside a capture."""

import os
import subprocess
import sys

import pytest
import torch
from mxep.cpp_bindings import CUDA_OPS
from mxep.torch_frontend import capabilities, force_implementation, ops
from torch import Tensor


def rows(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16().cuda()


def same(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


def test_an_op_with_a_cuda_kernel_runs_it() -> None:
    found = {name: capability.uses.partition(",")[0] for name, capability in capabilities().items()}
    assert found == {name: "cuda" if name in CUDA_OPS else "triton" for name in found}


@pytest.mark.parametrize("shape", [(64, 96), (3, 160, 40), (4096, 7168)])
def test_both_implementations_write_the_same_bytes(shape: tuple[int, ...]) -> None:
    x = rows(*shape)
    with force_implementation("triton"):
        want = ops.quantize_col(x)
    with force_implementation("cuda"):
        assert same(ops.quantize_col(x), want)


@pytest.mark.parametrize("num_experts", [4096, 4097])
def test_sort_at_and_above_the_expert_limit_of_cuda(num_experts: int) -> None:
    ids = torch.randint(num_experts, (20_000,), generator=torch.Generator().manual_seed(0)).int()
    assert same(
        tuple(x.cpu() for x in ops.sort_by_expert(ids.cuda(), num_experts)), ops.sort_by_expert(ids, num_experts)
    )


def test_triton_runs_sizes_that_cuda_does_not_support() -> None:
    """The operands are small integers, so sums are exact in any order."""
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randint(-4, 5, shape, generator=generator).bfloat16().cuda() for shape in ((9, 36), (2, 20, 36)))
    ends = torch.tensor([4, 7], dtype=torch.int32, device="cuda")
    want = torch.cat([x[:4].double() @ w[0].double().T, x[4:7].double() @ w[1].double().T, x.new_zeros(2, 20)])
    assert torch.equal(ops.grouped_mm_bf16(x, w, ends, "float32"), want.float())
    with force_implementation("cuda"), pytest.raises(NotImplementedError, match="N in multiples of 8, this is 20"):
        ops.grouped_mm_bf16(x, w, ends)


COLD_CAPTURE = """
import torch
from mxep.torch_frontend import ops
x = torch.randn(64, 64, device="cuda").bfloat16()
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    got = ops.quantize_col(x)
graph.replay()
assert all(torch.equal(g, w) for g, w in zip(got, ops.quantize_col(x), strict=True))
"""


def test_the_first_call_of_a_cuda_op_can_be_captured() -> None:
    ran = subprocess.run([sys.executable, "-c", COLD_CAPTURE], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


JAX_GRAPHS = """
import jax, jax.numpy as jnp, numpy as np
from mxep.jax_frontend import force_implementation, ops
x = jax.random.normal(jax.random.key(0), (3, 128, 96), jnp.bfloat16)
f = lambda x: [ops.quantize_col(x * s) + ops.quantize_row(x * s) for s in (1, 2, 3)]
forced = {}
for name in (None, "triton"):
    with force_implementation(name):
        jitted = jax.jit(f)
        forced[name] = [jax.tree.map(np.asarray, jitted(x)) for _ in range(3)]
jax.tree.map(np.testing.assert_array_equal, forced[None], forced["triton"])
"""


def test_cuda_and_triton_agree_in_jax_command_buffers() -> None:
    flags = "--xla_gpu_enable_command_buffer=FUSION,CUSTOM_CALL --xla_gpu_graph_min_graph_size=1"
    env = os.environ | {"XLA_FLAGS": flags, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    ran = subprocess.run([sys.executable, "-c", JAX_GRAPHS], env=env, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
