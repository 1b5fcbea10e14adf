"""The kernels over memory of peers become machine code at realistic sizes and at the least ones, and copy 16 bytes at a
time. They have no KernelOp, so their launches are written out here."""

from functools import cache
from typing import Any, NamedTuple

import pytest
import triton
from mxep.core_kernels.peer import kernel, plan
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from .test_cross_compile import ARCHS, VECTORS, assert_rounds_as_written, resources

I32, I64, U8, F32, BF16 = "*i32", "*i64", "*u8", "*fp32", "*bf16"
K, TOP_K, EXPERTS, RANKS, GROUPS = 7168, 8, 32, 4, 8


class Case(NamedTuple):
    kernel: str
    types: tuple[str, ...]
    constexprs: dict[str, Any]
    instructions: tuple[str, ...] = ()


def push(values: int, scales: int, size: int, top_k: int = TOP_K, flags: tuple[bool, bool] = (True, True), **more: Any):
    types = I64, {8: I64, 4: I32, 1: U8}[size], F32, I32, I64, I64, "i32", "i64", "i64", "i64"
    return Case("push", types, plan.push(values, scales, size, top_k, *flags), **more)


def clear(values: int, scales: int, weighted: bool, **more: Any) -> Case:
    types = I32, I32, I64, I64 if scales > 2 else U8, F32
    return Case("clear", types, plan.clear(values, scales, GROUPS, weighted), **more)


def pull(out: str, width: int, replicas: bool, mx: bool, wide: bool, *, slots: bool = False, **more: Any) -> Case:
    types = I32, I64, I64, "i32", "i64", "i64", out
    return Case("pull", types, plan.pull(width, TOP_K if replicas else 1, replicas, mx, wide, True, slots), **more)


LAY_OUT = I32, "i32", "i32", "i32", I64, I32, I32, I32, I32
COPIES: dict[str, Any] = {"instructions": VECTORS}
CASES = {
    "share_counts": Case("share_counts", (I32, I64, "i32", "i64"), plan.share_counts(EXPERTS)),
    "lay_out": Case("lay_out", LAY_OUT, plan.lay_out(EXPERTS, RANKS, 32)),
    "lay_out 256 experts": Case("lay_out", LAY_OUT, plan.lay_out(256, 8, 128)),
    "lay_out of a round": Case("lay_out", LAY_OUT, plan.lay_out(256, 8, 128, True)),
    "lay_out 6 experts": Case("lay_out", LAY_OUT, plan.lay_out(6, 2, 32)),
    "lay_out least": Case("lay_out", LAY_OUT, plan.lay_out(2, 2, 32)),
    "push mx": push(K // 8, K // 256, 8, **COPIES),
    "push mx 2048": push(256, 8, 8, **COPIES),
    "push mx 160": push(20, 5, 1),
    "push mx 64": push(8, 2, 1, 3),
    "push mx 32": push(4, 1, 1, 1),
    "push bf16": push(K // 4, 0, 1, **COPIES),
    "push rows": push(K // 8, K // 256, 8, 1, (False, False), **COPIES),
    "clear": clear(K // 8, K // 256, True, instructions=VECTORS[1:]),
    "clear 64": clear(8, 2, True),
    "clear bf16": clear(K // 4, 0, False, instructions=VECTORS[1:]),
    "pull": pull(BF16, K, True, False, False, **COPIES),
    "pull f32": pull(F32, K, True, False, True, **COPIES),
    "pull mx": pull(BF16, K, True, True, False, instructions=("st.global.v4.b32",)),
    "pull rows": pull(BF16, 2048, False, False, False, **COPIES),
    "pull rows mx": pull(F32, 160, False, True, True),
    "pull slots": pull(BF16, K, True, False, False, slots=True, **COPIES),
    "pull 32": pull(BF16, 32, True, True, False),
    **{
        f"pull_weights{' slots' if slots else ''}": Case(
            "pull_weights", (I32, I64, I64, "i32", "i64", F32), plan.pull_weights(slots)
        )
        for slots in (False, True)
    },
}


@cache
def compiled(name: str, arch: str) -> Any:
    case = CASES[name]
    function = getattr(kernel, f"{case.kernel}_kernel")
    types = [*case.types, *["constexpr"] * len(case.constexprs)]
    names = function.arg_names
    assert names[len(case.types) :] == list(case.constexprs)
    source = ASTSource(
        fn=function,
        signature=dict(zip(names, types, strict=True)),
        constexprs={(names.index(key),): value for key, value in case.constexprs.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i, kind in enumerate(types) if kind.startswith("*")},
    )
    options = {"enable_fp_fusion": False}
    return triton.compile(source, target=GPUTarget("cuda", ARCHS[arch], 32), options=options)


@pytest.mark.parametrize(("name", "arch"), [(n, a) for n in CASES for a in ARCHS if a == "sm_90" or n == "push mx"])
def test_machine_code(name: str, arch: str, tmp_path) -> None:
    code = compiled(name, arch)
    ptx, usage = code.asm["ptx"], resources(code.asm["cubin"], tmp_path)
    print(f"{name} {arch}: {usage['REG']} registers")
    assert usage["STACK"] == usage["LOCAL"] == 0, "registers spill"
    assert ".ftz" not in ptx
    assert ".nc" not in ptx, "loads that may be stale"
    assert_rounds_as_written(ptx, name)
    for instruction in CASES[name].instructions:
        assert instruction in ptx or instruction.replace("v4.b32", "v2.b64") in ptx, instruction
