"""Every op lowered for a GPU on a machine without one: the Triton kernel, compiled to PTX, is inside the program, or a
call to the CUDA C++ kernel."""

import os
import re
import subprocess
import sys
import zlib
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec
from mxep import cpp_bindings
from mxep.jax_frontend import RouterConfig, capabilities, force_implementation, grouped_mm, lower_for, moe, ops

from ...cases import sample

M, K, N, G = 64, 64, 96, 3


def bf16(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def i32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


ENDS = i32(G)
CALLS: dict[str, tuple[Callable, list[jax.ShapeDtypeStruct]]] = {}
for _name, _op in ops.OPS.items():
    _types, _options = sample(_op)
    CALLS[_name] = partial(getattr(ops, _name), **_options), [jax.ShapeDtypeStruct(*t) for t in _types]
COMPOSED = {name: [part.name for part in op.parts] for name, op in ops.OPS.items() if op.compose}


def kernels(lowered: jax.stages.Lowered) -> list[str]:
    """Our kernels in a program: the PTX inside each Triton call, the target of each call to CUDA C++."""
    found: list[str] = []

    def visit(op):
        if op.operation.name == "stablehlo.custom_call":
            target = op.attributes["call_target_name"].value
            if target == "triton_kernel_call":
                found.append(zlib.decompress(op.attributes["backend_config"].value_bytes).decode("latin-1"))
            elif target.startswith("mxep."):
                assert target.startswith("mxep.cuda."), f"{target}: a CPU kernel in a CUDA program"
                found.append(target)
        for region in op.regions:
            for block in region:
                for inner in block:
                    visit(inner)

    visit(lowered.compiler_ir().operation)
    return found


def ops_of(lowered: jax.stages.Lowered) -> Counter[str]:
    """How often each op is in a program, whatever it runs as; Triton kernels of several ops have all their names."""
    names: dict[str, list[str]] = {}
    for name, op in ops.OPS.items():
        if op.kernel:
            names.setdefault(op.triton_kernel().__name__, []).append(name)
    found: Counter[str] = Counter()
    for kernel in kernels(lowered):
        entry = re.search(r"\.visible \.entry (\w+)\(", kernel)
        found.update(names[entry[1]] if entry else [kernel.removeprefix("mxep.cuda.")])
    return found


def lower(name: str, arch: str) -> jax.stages.Lowered:
    function, arguments = CALLS[name]
    with lower_for(arch):
        return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",))


def test_rows_wider_than_the_cuda_kernel_takes_are_folded_in_parts() -> None:
    for k, expected in ((16384, ["quantize_both_fold"]), (16384 + 32, COMPOSED["quantize_both_fold"])):
        with lower_for("sm_90"):
            lowered = jax.jit(ops.quantize_both_fold).trace(bf16(M, k), ENDS).lower(lowering_platforms=("cuda",))
        assert ops_of(lowered) == Counter(expected)


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("quantize_matrix_fold", ["quantize_both", "fold_rows", "fold_rows"]),
        ("quantize_matrix_fold_t", ["quantize_col", "fold_rows"]),
    ],
)
def test_weights_in_fp32_are_folded_in_parts(name: str, parts: list[str]) -> None:
    for w, expected in ((bf16(G, N, K), [name]), (f32(G, N, K), parts)):
        with lower_for("sm_90"):
            lowered = jax.jit(getattr(ops, name)).trace(w).lower(lowering_platforms=("cuda",))
        assert ops_of(lowered) == Counter(expected)


def triton_cases() -> list[Any]:
    """Every op for both GPUs. All but the first op of a file of kernels on Hopper are slow: tests/kernels/cross_compile
    compiles the same kernels for both, at realistic sizes."""
    files, cases = set(), []
    for name, op in ops.OPS.items():
        if op.kernel:
            marks = [] if op.kernel.partition(":")[0] not in files else pytest.mark.slow
            files.add(op.kernel.partition(":")[0])
            cases.append(pytest.param(name, "sm_90", ".target sm_90a", marks=marks))
            cases.append(pytest.param(name, "sm_100", ".target sm_100a", marks=pytest.mark.slow))
    return cases


@pytest.mark.parametrize(("name", "arch", "target"), triton_cases())
def test_an_op_becomes_one_triton_kernel(name: str, arch: str, target: str) -> None:
    with force_implementation("triton"):
        (ptx,) = kernels(lower(name, arch))
    assert f".visible .entry {ops.OPS[name].triton_kernel().__name__}(" in ptx
    assert target in ptx
    # Without `.rn` XLA's ptxas may fuse a multiplication and an addition; what Triton fused is an fma.
    assert not re.search(r"\b(mul|add|sub)\.f32(x2)?\b", ptx)
    assert ("fma.rn.f32" in ptx) == name.startswith(("swiglu", "route"))


@pytest.mark.parametrize("arch", ["sm_89", "sm_120"])
@pytest.mark.parametrize("name", ["quantize_col", "grouped_mm_fold"])
def test_a_gpu_without_tiles_or_machine_code_of_its_own_runs_triton(name: str, arch: str) -> None:
    (ptx,) = kernels(lower(name, arch))
    assert f".visible .entry {ops.OPS[name].triton_kernel().__name__}(" in ptx
    assert f".target {arch}" in ptx


@pytest.mark.parametrize("name", COMPOSED)
def test_an_op_without_a_triton_kernel_becomes_others(name: str) -> None:
    with force_implementation("triton"):
        lowered = lower(name, "sm_90")
    found = ops_of(lowered)
    assert all(found[part] == COMPOSED[name].count(part) for part in COMPOSED[name])
    assert len(kernels(lowered)) == len(COMPOSED[name])


@pytest.mark.parametrize("name", ["grouped_mm_mx", "grouped_wgrad_mx"])
def test_blackwells_tensor_cores_take_the_scales(name: str) -> None:
    (ptx,) = kernels(lower(name, "sm_100"))
    assert "kind::mxf8f6f4.block_scale" in ptx


@pytest.mark.parametrize(("arch", "capability"), [("sm_90", (9, 0)), ("sm_100", (10, 0))])
@pytest.mark.parametrize("name", cpp_bindings.CUDA_OPS)
def test_an_op_of_the_cuda_table_becomes_a_call_to_it(name: str, arch: str, capability: tuple[int, int]) -> None:
    if capability not in cpp_bindings.cuda_op_archs[name]:
        with lower_for(arch):
            uses = capabilities("cuda")[name].uses
        assert uses == ", ".join(COMPOSED.get(name, [f"triton, {arch}"])), "Triton without machine code"
        return
    lowered = lower(name, arch)
    assert kernels(lowered) == [f"mxep.cuda.{name}"]
    assert "backend_config = {attrs = dense<" in lowered.as_text(), (
        "the typed FFI: attributes, and a stream at run time"
    )


def test_what_is_forced_is_part_of_the_key_of_jaxs_caches() -> None:
    jitted = jax.jit(ops.quantize_col)
    targets = []
    with lower_for("sm_90"):
        for implementation in (None, "triton", "cuda", None):
            with force_implementation(implementation):
                targets += kernels(jitted.trace(bf16(M, K)).lower(lowering_platforms=("cuda",)))
    assert [target == "mxep.cuda.quantize_col" for target in targets] == [True, False, True, True]


def test_a_forced_implementation_runs_or_raises() -> None:
    with force_implementation("cuda"), pytest.raises(NotImplementedError, match=r"row_map: .*no CUDA kernel for it"):
        lower("row_map", "sm_90")
    with force_implementation("cpp"), pytest.raises(NotImplementedError, match=r"row_map: .*allowed: a CPU"):
        lower("row_map", "sm_90")
    for gpu in ("cuda", "triton"):
        with force_implementation(gpu), pytest.raises(NotImplementedError, match=f"cpu with '{gpu}' forced"):
            ops.quantize_row(jnp.zeros((1, 32)))
    with force_implementation("cpp"):
        assert ops.quantize_row(jnp.zeros((1, 32)))[0].shape == (1, 32)
    with pytest.raises(ValueError, match="force_implementation: implementation: got 'c'"), force_implementation("c"):
        pass


def test_triton_sorts_by_more_experts_than_the_cuda_kernel_takes() -> None:
    def sort_by(num_experts: int) -> list[str]:
        with lower_for("sm_90"):
            traced = jax.jit(lambda ids: ops.sort_by_expert(ids, num_experts)).trace(i32(M))
            return kernels(traced.lower(lowering_platforms=("cuda",)))

    assert sort_by(4096) == ["mxep.cuda.sort_by_expert"]
    (ptx,) = sort_by(4097)
    assert f".visible .entry {ops.OPS['sort_by_expert'].triton_kernel().__name__}(" in ptx
    with force_implementation("cuda"), pytest.raises(NotImplementedError, match="up to 4096 experts, these are 4097"):
        sort_by(4097)


def test_triton_multiplies_rows_that_the_cuda_kernel_cannot_copy() -> None:
    def product(n: int, k: int) -> list[str]:
        with lower_for("sm_90"):
            traced = jax.jit(ops.grouped_mm_bf16).trace(bf16(M, k), bf16(G, n, k), ENDS)
            return kernels(traced.lower(lowering_platforms=("cuda",)))

    assert product(24, 40) == ["mxep.cuda.grouped_mm_bf16"]
    for n, k in ((20, 40), (24, 36)):
        (ptx,) = product(n, k)
        assert f".visible .entry {ops.OPS['grouped_mm_bf16'].triton_kernel().__name__}(" in ptx
    with (
        force_implementation("cuda"),
        pytest.raises(NotImplementedError, match="K in multiples of 8, this is 36"),
    ):
        product(24, 36)


def test_what_runs_and_why_the_rest_does_not() -> None:
    with lower_for("sm_90"):
        on_gpu = capabilities("cuda")
    assert on_gpu["quantize_col"].uses == "cuda, sm_90"
    assert on_gpu["row_map"].uses == "triton, sm_90"
    assert "no CUDA kernel" in on_gpu["row_map"].absent["cuda"]
    assert set(capabilities("cpu")["quantize_row"].absent) == {"cuda", "triton"}


@pytest.mark.parametrize(("arch", "product", "other"), [
    ("sm_90", "grouped_mm_fold", "grouped_mm_mx"),
    # Slow: test_one_program_is_traced_for_each_architecture has the choice, other tests the kernels.
    pytest.param("sm_100", "grouped_mm_mx", "grouped_mm_fold", marks=pytest.mark.slow),
])  # fmt: skip
def test_the_gradient_of_the_layer_is_our_kernels_and_folds_on_hopper(arch: str, product: str, other: str) -> None:
    config = moe.MoEConfig(64, 96, num_experts=4, router=RouterConfig(top_k=2), recipe="mxfp8_wgrad_with_hp")
    spec = {"router": PartitionSpec(), "experts": PartitionSpec("ep")}
    layer = jax.shard_map(
        lambda params, x: moe.apply(params, x, config, axis_name="ep")[0],
        mesh=Mesh(np.array(jax.devices("cpu")[:2]), ("ep",)),
        in_specs=(spec, PartitionSpec("ep")),
        out_specs=PartitionSpec("ep"),
    )
    params = jax.eval_shape(lambda: moe.init(jax.random.key(0), config))
    x = jax.ShapeDtypeStruct((32, 64), jnp.bfloat16)
    with lower_for(arch):
        lowered = (
            jax.jit(jax.grad(lambda p, x: (layer(p, x).astype(jnp.float32) ** 2).sum(), argnums=(0, 1)))
            .trace(params, x)
            .lower(lowering_platforms=("cuda",))
        )
    found = ops_of(lowered)
    sums = found["grouped_mm_fold_sum"]
    assert sums == (arch == "sm_90"), "the input gradient of w1 and w3"
    pairs = found["grouped_mm_fold_pair"]
    assert pairs == sums, "the products of w1 and w3"
    assert found[product] + 2 * pairs + 2 * sums == 6, "three products forward, three input gradients"
    assert not found[other]
    assert found["grouped_wgrad_bf16"] == 3
    assert found["permute_mx"] == 2


def test_one_program_is_traced_for_each_architecture() -> None:
    """What "auto" decides is part of the key of JAX's caches."""
    multiply = jax.jit(jax.grad(lambda *a: grouped_mm(*a, recipe="mxfp8").astype(jnp.float32).sum()))
    found = []
    for arch in ("sm_90", "sm_100", "sm_90"):
        with lower_for(arch):
            traced = multiply.trace(bf16(M, K), bf16(G, N, K), ENDS)
            found.append("grouped_mm_fold" in ops_of(traced.lower(lowering_platforms=("cuda",))))
    assert found == [True, False, True]


def test_without_a_gpu_the_architecture_must_be_given() -> None:
    with pytest.raises(NotImplementedError, match="lower_for"):
        jax.jit(ops.quantize_row).trace(bf16(M, K)).lower(lowering_platforms=("cuda",))


def test_an_unknown_architecture_is_refused() -> None:
    with pytest.raises(ValueError, match="sm_80"), lower_for("sm_80"):
        pass


@pytest.mark.parametrize("before", ["a-cache", None])
def test_importing_jax_triton_leaves_tritons_cache_where_it_was(before: str | None) -> None:
    code = (
        "import os; from mxep.jax_frontend.ops.triton import _jax_triton as load; load(); "
        "print(os.getenv('TRITON_CACHE_DIR'))"
    )
    env = {k: v for k, v in os.environ.items() if k != "TRITON_CACHE_DIR"}
    env |= {"TRITON_CACHE_DIR": before} if before else {}
    ran = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == str(before)
