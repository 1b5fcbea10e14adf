"""Every op lowered for a GPU on a machine without one: the Triton kernel, compiled to PTX, is inside the program."""

import os
import re
import subprocess
import sys
import zlib
from collections import Counter
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec
from mxep.jax_frontend import lower_for, moe, ops

M, K, N, G = 64, 64, 96, 3


def u8(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.uint8)


def bf16(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def i32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


ENDS = i32(G)
CALLS: dict[str, tuple[Callable, list[jax.ShapeDtypeStruct]]] = {
    "quantize_row": (ops.quantize_row, [bf16(G, N, K)]),
    "quantize_row_packed": (ops.quantize_row_packed, [bf16(M, K)]),
    "quantize_col": (ops.quantize_col, [bf16(G, N, K)]),
    "quantize_both": (ops.quantize_both, [bf16(M, K)]),
    "dequantize": (ops.dequantize, [u8(M, K), u8(M, K // 32)]),
    "permute_rows": (ops.permute_rows, [bf16(M, K), i32(2 * M)]),
    "permute_mx": (ops.permute_mx, [u8(M, K + K // 32), i32(2 * M)]),
    "sort_by_expert": (lambda ids: ops.sort_by_expert(ids, 8), [i32(M)]),
    "row_map": (lambda counts: ops.row_map(counts, num_rows=M, num_local_experts=G), [i32(2 * G)]),
    "fold_rows": (ops.fold_rows, [u8(M, K), u8(M, K // 32)]),
    "quantize_row_fold": (ops.quantize_row_fold, [bf16(G, N, K)]),
    "permute_mx_fold": (ops.permute_mx_fold, [u8(M, K + K // 32), i32(2 * M)]),
    "block_scales": (ops.block_scales, [u8(M, K // 32), ENDS]),
    "unblock_scales": (
        lambda blocked, ends: ops.unblock_scales(blocked, ends, num_rows=M, num_scales=K // 32),
        [u8((M + 127 * G) // 128 * 128, 4), ENDS],
    ),
    "grouped_mm_mx": (ops.grouped_mm_mx, [u8(M, K), u8(M, K // 32), u8(G, N, K), u8(G, N, K // 32), ENDS]),
    "grouped_mm_bf16": (ops.grouped_mm_bf16, [bf16(M, K), bf16(G, N, K), ENDS]),
    "grouped_wgrad_mx": (ops.grouped_wgrad_mx, [u8(N, M), u8(N, M // 32), u8(K, M), u8(K, M // 32), ENDS]),
    "grouped_wgrad_bf16": (ops.grouped_wgrad_bf16, [bf16(M, N), bf16(M, K), ENDS]),
}


def kernels(lowered: jax.stages.Lowered) -> list[str]:
    """The PTX inside each Triton call of a program; no other custom call of ours may be there."""
    found: list[str] = []

    def visit(op):
        if op.operation.name == "stablehlo.custom_call":
            target = op.attributes["call_target_name"].value
            assert not target.startswith("mxep."), f"{target}: a CPU kernel in a CUDA program"
            if target == "triton_kernel_call":
                found.append(zlib.decompress(op.attributes["backend_config"].value_bytes).decode("latin-1"))
        for region in op.regions:
            for block in region:
                for inner in block:
                    visit(inner)

    visit(lowered.compiler_ir().operation)
    return found


def test_the_table_names_every_op() -> None:
    assert CALLS.keys() == ops.OPS.keys()


@pytest.mark.parametrize(("arch", "target"), [("sm_90", ".target sm_90a"), ("sm_100", ".target sm_100a")])
@pytest.mark.parametrize("name", CALLS)
def test_an_op_becomes_one_triton_kernel(name: str, arch: str, target: str) -> None:
    function, arguments = CALLS[name]
    with lower_for(arch):
        lowered = jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",))
    (ptx,) = kernels(lowered)
    assert f".visible .entry {ops.OPS[name].kernel.__name__}(" in ptx
    assert target in ptx


def test_the_gradient_of_the_layer_is_triton_kernels_alone() -> None:
    config = moe.MoEConfig(64, 96, num_experts=4, top_k=2)
    spec = {"router": PartitionSpec(), "experts": PartitionSpec("ep")}
    layer = jax.shard_map(
        lambda params, x: moe.apply(params, x, config, axis_name="ep")[0],
        mesh=Mesh(np.array(jax.devices("cpu")[:2]), ("ep",)),
        in_specs=(spec, PartitionSpec("ep")),
        out_specs=PartitionSpec("ep"),
    )
    params = jax.eval_shape(lambda: moe.init(jax.random.key(0), config))
    x = jax.ShapeDtypeStruct((32, 64), jnp.bfloat16)
    with lower_for("sm_90"):
        lowered = (
            jax.jit(jax.grad(lambda p, x: layer(p, x).astype(jnp.float32).sum(), argnums=(0, 1)))
            .trace(params, x)
            .lower(lowering_platforms=("cuda",))
        )
    names = Counter(re.search(r"\.visible \.entry (\w+)\(", ptx)[1] for ptx in kernels(lowered))
    assert names[ops.OPS["grouped_mm_mx"].kernel.__name__] >= 6, "three products forward, three input gradients"
    assert names[ops.OPS["grouped_wgrad_bf16"].kernel.__name__] == 3
    assert names[ops.OPS["permute_mx"].kernel.__name__] == 2


def test_without_a_gpu_the_architecture_must_be_given() -> None:
    with pytest.raises(NotImplementedError, match="lower_for"):
        jax.jit(ops.quantize_row).trace(bf16(M, K)).lower(lowering_platforms=("cuda",))


def test_an_unknown_architecture_is_refused() -> None:
    with pytest.raises(ValueError, match="sm_80"), lower_for("sm_80"):
        pass


@pytest.mark.parametrize("before", ["a-cache", None])
def test_importing_jax_triton_leaves_tritons_cache_where_it_was(before: str | None) -> None:
    code = (
        "import os; from mxep.jax_frontend import _triton as t; t._jax_triton(); print(os.getenv('TRITON_CACHE_DIR'))"
    )
    env = {k: v for k, v in os.environ.items() if k != "TRITON_CACHE_DIR"}
    env |= {"TRITON_CACHE_DIR": before} if before else {}
    ran = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == str(before)
