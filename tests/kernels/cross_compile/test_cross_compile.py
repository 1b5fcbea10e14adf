"""Every Triton kernel becomes machine code for Hopper and Blackwell, on a machine without a GPU.

    plan (arch, realistic shape) --> signature, constexprs, warps, stages --> triton.compile --> PTX, cubin

Checked in the result: no register spills, the hardware's conversions and matrix instructions, 16-byte
loads and stores, and no flush-to-zero arithmetic (2^-127 is an fp32 subnormal). `pytest -s` prints registers.
"""

import re
import subprocess
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import triton
from mxep.core_kernels.combine import plan as combine
from mxep.core_kernels.fold import plan as fold
from mxep.core_kernels.fold.gathered import plan_permute as fold_permute
from mxep.core_kernels.formats import packed_width, spans
from mxep.core_kernels.grouped_gemm.blockwise import plan as blockwise_gemm
from mxep.core_kernels.grouped_gemm.exact import plan as grouped_gemm
from mxep.core_kernels.grouped_gemm.exact import plan_kn
from mxep.core_kernels.grouped_gemm.folded import plan as folded_gemm
from mxep.core_kernels.launch import NO_ENDS, ArrayType, KernelOp
from mxep.core_kernels.permute import plan as permute
from mxep.core_kernels.quantize import plan as quantize
from mxep.core_kernels.quantize import plan_blockwise as blockwise
from mxep.core_kernels.registry import OPS
from mxep.core_kernels.router import plan as router
from mxep.core_kernels.router import plan_logits as router_logits
from mxep.core_kernels.routing import plan as routing
from mxep.core_kernels.scale_layout import plan as scale_layout
from mxep.core_kernels.swiglu import plan as swiglu
from mxep.core_kernels.swiglu import plan_blockwise as swiglu_blockwise
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ...cases import sample

ARCHS = {"sm_90": 90, "sm_100": 100}
SHARED_MEMORY = 99 * 1024
"""Bytes of shared memory that a program has on sm_89 and on sm_120."""
POINTERS = {"uint8": "*u8", "bfloat16": "*bf16", "float32": "*fp32", "int32": "*i32"}
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"

M, N, K, GROUPS = 131072, 2048, 7168, 8
TOP_K, ROWS = 8, 131072 * 8 + GROUPS * 128


def bf16(*shape: int) -> ArrayType:
    return ArrayType(shape, "bfloat16")


def u8(*shape: int) -> ArrayType:
    return ArrayType(shape, "uint8")


def i32(*shape: int) -> ArrayType:
    return ArrayType(shape, "int32")


def glu(m: int, f: int, weighted: bool = True) -> tuple[ArrayType, ...]:
    return bf16(m, f), bf16(m, f), ArrayType((m if weighted else 0,), "float32")


def f32(*shape: int) -> ArrayType:
    return ArrayType(shape, "float32")


def mx(*shape: int) -> tuple[ArrayType, ArrayType]:
    return u8(*shape), u8(*shape[:-1], shape[-1] // 32)


class Case(NamedTuple):
    op: KernelOp
    inputs: tuple[ArrayType, ...]
    options: dict = {}  # noqa: RUF012 -- never written to
    instructions: tuple[str, ...] = ()


VECTORS = ("ld.global.v4.b32", "st.global.v4.b32")
QUANTIZE = (*VECTORS, "cvt.rn.satfinite.e4m3x2.f32")
CLAMPED = {"alpha": 1.702, "limit": 7.0, "offset": 1.0}
CASES = {
    "quantize_row": Case(quantize.quantize_row, (bf16(M, K),), {}, QUANTIZE),
    "quantize_row f32": Case(quantize.quantize_row, (ArrayType((M, K), "float32"),), {}, QUANTIZE),
    "quantize_row_packed": Case(quantize.quantize_row_packed, (bf16(M, K),), {}, QUANTIZE),
    "quantize_col": Case(quantize.quantize_col, (bf16(M, K),), {}, QUANTIZE),
    "quantize_col 3D floor": Case(quantize.quantize_col, (bf16(GROUPS, N, K),), {"rounding": 1}, QUANTIZE),
    "quantize_col satfinite": Case(quantize.quantize_col, (bf16(M, K),), {"satfinite": True}, QUANTIZE),
    "quantize_col f32": Case(quantize.quantize_col, (ArrayType((M, K), "float32"),), {}, QUANTIZE),
    "dequantize": Case(quantize.dequantize, mx(M, K), {}, (*VECTORS, "cvt.rn.f16x2.e4m3x2")),
    "dequantize f32": Case(quantize.dequantize, mx(M, K), {"out_dtype": "float32"}, ("st.global.v4.b32",)),
    "permute_rows bf16": Case(permute.permute_rows, (bf16(M, K), i32(M)), {}, VECTORS),
    "permute_rows u8": Case(permute.permute_rows, (u8(M, K), i32(M)), {}, VECTORS),
    "permute_mx": Case(permute.permute_mx, (u8(M, packed_width(K)), i32(M)), {}, VECTORS),
    "fold_rows": Case(fold.fold_rows, mx(M, K), {}, QUANTIZE),
    "fold_rows ends": Case(fold.fold_rows, (*mx(M, K), i32(GROUPS)), {"headroom": 2}, QUANTIZE),
    "permute_mx_fold": Case(fold_permute.permute_mx_fold, (u8(M, packed_width(K)), i32(M)), {}, QUANTIZE),
    "permute_mx_fold ends": Case(
        fold_permute.permute_mx_fold, (u8(M, packed_width(K)), i32(M), i32(GROUPS)), {}, QUANTIZE
    ),
    "quantize_row_fold": Case(fold.quantize_row_fold, (bf16(M, K),), {}, QUANTIZE),
    "quantize_row_fold f32": Case(fold.quantize_row_fold, (ArrayType((M, K), "float32"),), {}, QUANTIZE),
    "quantize_rowwise": Case(quantize.quantize_rowwise, (bf16(M, K),), {}, QUANTIZE),
    "quantize_rowwise 3D floor": Case(quantize.quantize_rowwise, (bf16(GROUPS, N, K),), {"rounding": 1}, QUANTIZE),
    "quantize_rowwise f32 satfinite": Case(quantize.quantize_rowwise, (f32(M, K),), {"satfinite": True}, QUANTIZE),
    "quantize_blockwise": Case(blockwise.quantize_blockwise, (bf16(M, K),), {}, QUANTIZE),
    "quantize_blockwise f32 powers": Case(
        blockwise.quantize_blockwise, (f32(GROUPS, M, K),), {"power_of_two": True}, QUANTIZE
    ),
    "quantize_squares": Case(blockwise.quantize_squares, (bf16(GROUPS, N, K),), {}, QUANTIZE),
    "quantize_squares_both": Case(blockwise.quantize_squares_both, (bf16(GROUPS, N, K),), {}, QUANTIZE),
    "quantize_squares f32 powers": Case(blockwise.quantize_squares, (f32(N, K),), {"power_of_two": True}, QUANTIZE),
    "quantize_rowwise wide": Case(quantize.quantize_rowwise, (bf16(M, 16384),), {}, QUANTIZE),
    "quantize_rowwise wide f32": Case(quantize.quantize_rowwise, (f32(M, 16384),), {}, QUANTIZE),
    "fold_groups": Case(fold.fold_groups, (*mx(K, M), i32(GROUPS)), {}, QUANTIZE),
    "block_scales": Case(scale_layout.block_scales, (u8(M, K // 32), i32(GROUPS))),
    "unblock_scales": Case(
        scale_layout.unblock_scales,
        (u8((M + 127 * GROUPS) // 128 * 128, K // 32), i32(GROUPS)),
        {"num_rows": M, "num_scales": K // 32},
    ),
    "combine": Case(combine.combine, (bf16(ROWS, K), i32(M, TOP_K), f32(M, TOP_K)), {}, VECTORS),
    "combine f32": Case(
        combine.combine, (f32(ROWS, K), i32(M, TOP_K), f32(M, TOP_K)), {"out_dtype": "float32"}, VECTORS
    ),
    "combine unweighted": Case(combine.combine, (bf16(ROWS, K), i32(M, TOP_K), f32(0)), {}, VECTORS),
    "combine_bwd": Case(
        combine.combine_bwd, (bf16(M, K), bf16(ROWS, K), i32(M, TOP_K), i32(ROWS), f32(M, TOP_K)), {}, VECTORS
    ),
    "combine_bwd f32 top 6": Case(
        combine.combine_bwd, (f32(M, K), f32(ROWS, K), i32(M, 6), i32(ROWS), f32(M, 6)), {}, VECTORS
    ),
    "combine_bwd top 1": Case(
        combine.combine_bwd, (bf16(M, K), bf16(ROWS, K), i32(M, 1), i32(ROWS), f32(M, 1)), {}, VECTORS
    ),
    "combine_bwd_row": Case(
        combine.combine_bwd_row, (bf16(M, K), bf16(ROWS, K), i32(M, TOP_K), i32(ROWS), f32(M, TOP_K)), {}, VECTORS
    ),
    "combine_bwd unweighted": Case(
        combine.combine_bwd, (bf16(M, K), bf16(ROWS, K), i32(M, TOP_K), i32(ROWS), f32(0)), {}, ("st.global.v4.b32",)
    ),
    "route": Case(router.route, (f32(M, 64), f32(0)), {"top_k": 6}, ("ld.global.v4.b32", "div.rn.f32")),
    "route bf16": Case(
        router.route, (bf16(M, 128), f32(0)), {"top_k": 8, "score_func": "softmax_of_chosen"}, ("ld.global.v4.b32",)
    ),
    "route in groups": Case(
        router.route,
        (f32(M, 256), f32(256)),
        {"top_k": 8, "score_func": "sigmoid", "num_groups": 8, "top_k_groups": 4, "route_scale": 2.5},
        ("ld.global.v4.b32", "div.rn.f32"),
    ),
    "route of most experts": Case(router.route, (f32(M, 512), f32(512)), {"top_k": 32, "score_func": "sigmoid"}),
    "route in wide groups": Case(
        router.route, (f32(M, 510), f32(0)), {"top_k": 32, "num_groups": 6, "top_k_groups": 3}
    ),
    "route balanced": Case(router.route, (f32(M, 40), f32(0)), {"top_k": 6, "force_balance": True}),
    "logits_bwd": Case(
        router_logits.logits_bwd,
        (bf16(M, 2 * 64), bf16(64, N), bf16(M, N)),
        {},
        ("mma", *VECTORS),
    ),
    "logits_bwd of few experts": Case(router_logits.logits_bwd, (bf16(M, 2 * 6), bf16(6, N), bf16(0)), {}, ("mma",)),
    "route_bwd": Case(
        router.route_bwd, (f32(M, 6), f32(0), f32(M, 64), i32(M, 6)), {}, ("ld.global.v4.b32", "st.global.v4.b32")
    ),
    "route_bwd bf16": Case(
        router.route_bwd, (f32(M, 8), f32(128), bf16(M, 128), i32(M, 8)), {"score_func": "softmax_of_chosen"}
    ),
    "route_bwd in two terms": Case(router.route_bwd, (f32(M, 8), f32(0), f32(M, 128), i32(M, 8)), {"split": True}),
    "route_bwd of most experts": Case(
        router.route_bwd, (f32(M, 32), f32(512), f32(M, 512), i32(M, 32)), {"score_func": "sigmoid"}
    ),
    "sort_by_expert": Case(routing.sort_by_expert, (i32(M),), {"num_experts": 256}),
    "row_map": Case(routing.row_map, (i32(256),), {"num_rows": M, "num_local_experts": GROUPS}),
    "row_map of fixed parts": Case(
        routing.row_map, (i32(256),), {"num_rows": M, "num_local_experts": GROUPS, "rank_rows": M // 32}
    ),
    "slot_map": Case(routing.slot_map, (i32(256), i32(M), f32(M)), {"top_k": 8}),
    "swiglu": Case(swiglu.swiglu, glu(M, N), {}, VECTORS),
    "swiglu without prob": Case(swiglu.swiglu, glu(M, N, False), {}, VECTORS),
    "swiglu clamped": Case(swiglu.swiglu, glu(M, N), CLAMPED, VECTORS),
    "swiglu_blockwise": Case(swiglu_blockwise.swiglu_blockwise, glu(M, N), {}, QUANTIZE),
    "swiglu_blockwise_bwd": Case(swiglu_blockwise.swiglu_blockwise_bwd, (bf16(M, N), *glu(M, N)), {}, QUANTIZE),
    "swiglu_bwd": Case(swiglu.swiglu_bwd, (bf16(M, N), *glu(M, N)), {}, VECTORS),
    "swiglu_bwd without prob": Case(swiglu.swiglu_bwd, (bf16(M, N), *glu(M, N, False)), {}, VECTORS),
    "swiglu_bwd clamped": Case(swiglu.swiglu_bwd, (bf16(M, N), *glu(M, N)), CLAMPED, VECTORS),
    "grouped_mm_mx": Case(grouped_gemm.grouped_mm_mx, (*mx(M, K), *mx(GROUPS, N, K), i32(GROUPS)), {}, ("mx mma",)),
    "grouped_mm_mx f32": Case(
        grouped_gemm.grouped_mm_mx, (*mx(M, N), *mx(GROUPS, K, N), i32(GROUPS)), {"out_dtype": "float32"}, ("mx mma",)
    ),
    "grouped_mm_mx scales at odd bytes": Case(
        grouped_gemm.grouped_mm_mx, (*mx(M, 160), *mx(GROUPS, N, 160), i32(GROUPS)), {}, ("mx mma",)
    ),
    "grouped_mm_bf16": Case(grouped_gemm.grouped_mm_bf16, (bf16(M, K), bf16(GROUPS, N, K), i32(GROUPS)), {}, ("mma",)),
    "grouped_wgrad_mx": Case(grouped_gemm.grouped_wgrad_mx, (*mx(N, M), *mx(K, M), i32(GROUPS)), {}, ("mx mma",)),
    "grouped_wgrad_mx f32": Case(
        grouped_gemm.grouped_wgrad_mx, (*mx(N, M), *mx(K, M), i32(GROUPS)), {"out_dtype": "float32"}, ("mx mma",)
    ),
    "grouped_mm_bf16_kn": Case(plan_kn.grouped_mm_bf16_kn, (bf16(M, K), bf16(GROUPS, K, N), i32(GROUPS)), {}, ("mma",)),
    "grouped_mm_bf16_kn_sum": Case(
        plan_kn.grouped_mm_bf16_kn_sum, (*(bf16(M, K), bf16(GROUPS, K, N)) * 2, i32(GROUPS)), {}, ("mma",)
    ),
    "grouped_wgrad_bf16": Case(grouped_gemm.grouped_wgrad_bf16, (bf16(M, N), bf16(M, K), i32(GROUPS)), {}, ("mma",)),
    "grouped_wgrad_bf16_t": Case(
        grouped_gemm.grouped_wgrad_bf16_t, (bf16(N, M), bf16(K, M), i32(GROUPS)), {}, ("mma",)
    ),
    "grouped_mm_fold": Case(
        folded_gemm.grouped_mm_fold, (u8(M, K), u8(M), u8(GROUPS, N, K), u8(GROUPS, N), i32(GROUPS)), {}, ("fp8 mma",)
    ),
    "grouped_mm_fold f32": Case(
        folded_gemm.grouped_mm_fold,
        (u8(M, K), u8(M), u8(GROUPS, N, K), u8(GROUPS, N), i32(GROUPS)),
        {"out_dtype": "float32"},
        ("fp8 mma",),
    ),
    "grouped_mm_fold_bias": Case(
        folded_gemm.grouped_mm_fold_bias,
        (u8(M, K), u8(M), u8(GROUPS, N, K), u8(GROUPS, N), f32(GROUPS, N), i32(GROUPS)),
        {},
        ("fp8 mma",),
    ),
    "grouped_mm_fold_bias f32": Case(
        folded_gemm.grouped_mm_fold_bias,
        (u8(M, K), u8(M), u8(GROUPS, N, K), u8(GROUPS, N), f32(GROUPS, N), i32(GROUPS)),
        {"out_dtype": "float32"},
        ("fp8 mma",),
    ),
    "grouped_mm_fold_sum": Case(
        folded_gemm.grouped_mm_fold_sum,
        (
            *(u8(M, K), u8(M), u8(GROUPS, N, K), u8(GROUPS, N)),
            *(u8(M, 96), u8(M), u8(GROUPS, N, 96), u8(GROUPS, N), i32(GROUPS)),
        ),
        {},
        ("fp8 mma",),
    ),
    "grouped_mm_blockwise": Case(
        blockwise_gemm.grouped_mm_blockwise,
        (u8(M, K), f32(M, -(-K // 128)), u8(GROUPS, N, K), f32(GROUPS, -(-N // 128), -(-K // 128)), i32(GROUPS)),
        {},
        ("fp8 mma",),
    ),
    "grouped_mm_blockwise_sum": Case(
        blockwise_gemm.grouped_mm_blockwise_sum,
        (*(u8(M, K), f32(M, -(-K // 128)), u8(GROUPS, N, K), f32(GROUPS, -(-N // 128), -(-K // 128))) * 2, i32(GROUPS)),
        {},
        ("fp8 mma",),
    ),
    "grouped_wgrad_fold": Case(
        folded_gemm.grouped_wgrad_fold,
        (u8(N, M), u8(spans(M, GROUPS), N), u8(K, M), u8(spans(M, GROUPS), K), i32(GROUPS)),
        {},
        ("fp8 mma",),
    ),
}
_COVERED = {case.op for case in CASES.values()}
for _op in OPS.values():
    if _op.kernel and _op not in _COVERED:
        _types, _options = sample(_op)
        CASES[_op.name] = Case(_op, tuple(_types), _options)
MMA = {
    "mma": {"sm_90": "wgmma.mma_async", "sm_100": "tcgen05.mma"},
    "mx mma": {"sm_90": "wgmma.mma_async", "sm_100": "tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale"},
    "fp8 mma": {"sm_90": ".f32.e4m3.e4m3", "sm_100": "kind::f8f6f4"},
}


@cache
def compiled(case_name: str, arch: str):
    op, inputs, options, _ = CASES[case_name]
    return compile_plan(op, inputs, arch, options)


def compile_plan(op: KernelOp, inputs: tuple[ArrayType, ...], arch: str, options: dict, target: int = 0):
    """Compiles a launch as on `arch`: pointers aligned to 16 bytes, scalars without hints, 1 as a constant.

    target: another GPU that uses the tiles of `arch`, as 10 * major + minor.
    """
    inputs = op.complete(inputs, NO_ENDS)
    plan, kernel = op.launch(*inputs, arch=arch, **options), op.triton_kernel()
    types = [POINTERS[a.dtype] for a in inputs]
    types += ["constexpr" if value == 1 else "i32" for value in plan.scalars.values()]
    types += [POINTERS[a.dtype] for a in plan.out]
    names = kernel.arg_names
    constants = {**plan.meta, **{name: 1 for name, value in plan.scalars.items() if value == 1}}
    assert names[len(inputs) : len(inputs) + len(plan.scalars)] == list(plan.scalars)
    assert set(names[len(types) :]) == set(plan.meta)
    types += ["constexpr"] * len(plan.meta)
    source = ASTSource(
        fn=kernel,
        signature=dict(zip(names, types, strict=True)),
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i, kind in enumerate(types) if kind.startswith("*")},
    )
    return triton.compile(
        source,
        target=GPUTarget("cuda", target or ARCHS[arch], 32),
        options={"num_warps": plan.num_warps, "num_stages": plan.num_stages, "enable_fp_fusion": False},
    )


def resources(cubin: bytes, folder: Path) -> dict[str, int]:
    """REG, STACK, LOCAL and SHARED of the one kernel in a cubin."""
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    report = subprocess.run(
        [CUOBJDUMP, "--dump-resource-usage", path], capture_output=True, text=True, check=True
    ).stdout
    return {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL|SHARED):(\d+)", report)}


def assert_rounds_as_written(ptx: str, case_name: str) -> None:
    """`mul.f32` and `add.f32` without `.rn` are what ptxas may fuse; a fused one is in the PTX already.

    Meant are five of the polynomial of an exponential and two of a reciprocal, some packed in twos: SwiGLU has one of
    each per value, the router's softmax an exponential alone.
    """
    assert not re.search(r"\b(mul|add|sub)\.f32(x2)?\b", ptx)
    reciprocals = ptx.count("rcp.approx.ftz.f32")
    exponentials, others = divmod(ptx.count("fma.rn.f32") + ptx.count("fma.rn.f32x2") - 2 * reciprocals, 5)
    assert not others
    assert exponentials == reciprocals or case_name.startswith("route")
    assert ("fma.rn.f32" in ptx) == case_name.startswith(("swiglu", "route"))


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("case_name", CASES)
def test_machine_code(case_name, arch, tmp_path):
    kernel = compiled(case_name, arch)
    ptx = kernel.asm["ptx"]
    assert re.search(r"^\.target sm_(\d+)", ptx, re.M)[1] == str(ARCHS[arch])
    usage = resources(kernel.asm["cubin"], tmp_path)
    print(f"{case_name} {arch}: {usage['REG']} registers, {kernel.metadata.shared} bytes of shared memory")
    assert usage["STACK"] == usage["LOCAL"] == 0, "registers spill"
    assert set(re.findall(r"\S*\.ftz\S*", ptx)) <= {"rcp.approx.ftz.f32"}  # of [1, 2]: nothing to flush
    assert_rounds_as_written(ptx, case_name)
    for instruction in CASES[case_name].instructions:
        assert (MMA[instruction][arch] if instruction in MMA else instruction) in ptx


@pytest.mark.parametrize("target", [89, 120])
@pytest.mark.parametrize("case_name", ["grouped_mm_bf16", "grouped_mm_fold", "grouped_wgrad_fold"])
def test_the_largest_tiles_of_hopper_fit_gpus_that_have_none_of_their_own(case_name, target):
    op, inputs, options, _ = CASES[case_name]
    assert compile_plan(op, inputs, "sm_90", options, target).metadata.shared <= SHARED_MEMORY
