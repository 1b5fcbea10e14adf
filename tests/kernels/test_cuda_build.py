"""The CUDA C++ kernels are machine code for Hopper and Blackwell inside the module, on a machine without a GPU.

    core_kernels/*/*.cu --nvcc--> _ops.so --cuobjdump--> targets, resource usage, SASS

Nothing here is skipped without nvcc: `make test` installs one, and a build without CUDA kernels fails.
"""

import re
import subprocess
from functools import cache
from pathlib import Path

import pytest
import torch
import triton
from mxep import cpp_bindings
from mxep.core_kernels.quantize import plan as quantize
from mxep.core_kernels.registry import OPS
from mxep.cpp_bindings import _ops

from ..cases import sample

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
TARGETS = {"sm_90a", "sm_100a"}


@cache
def dump(option: str) -> str:
    return subprocess.run([CUOBJDUMP, option, _ops.__file__], capture_output=True, text=True, check=True).stdout


@cache
def kernels(option: str) -> dict[tuple[str, str], str]:
    """(target, mangled name) -> cuobjdump's text for the kernel."""
    found = {}
    for part in re.split(r"\n(?=arch = )", dump(option))[1:]:
        target = part.split()[2]
        for kernel in re.split(r"\n\s*Function\s*:?\s*", part)[1:]:
            name = re.match(r"[\w$.]+", kernel)
            assert name
            found[target, name[0]] = kernel
    return found


def test_the_module_holds_machine_code_for_both_chips() -> None:
    assert cpp_bindings.cuda_archs == ((9, 0), (10, 0))
    assert {target for target, _ in kernels("--dump-resource-usage")} == TARGETS
    assert "ptxasOptions" not in dump("--list-ptx"), "no PTX, which a driver would compile at the first call"


EXCHANGE = cpp_bindings.Exchange(torch.Tensor)
EMPTY = torch.empty(0)


def test_the_table_names_ops_that_the_plans_describe() -> None:
    assert cpp_bindings.CUDA_OPS, "no CUDA kernels in this build: nvcc was not found"
    for name in cpp_bindings.CUDA_OPS:
        op = OPS[name]
        types, options = sample(op)
        launch = op.launch(*types, arch="sm_90", **options)
        arrays = [((32, 32), "uint8")] * 13
        outputs, attrs = len(launch.out) + len(launch.scratch), len(launch.cuda_attrs)
        with pytest.raises(ValueError, match=f"{name}: inputs: got 13; allowed: {len(op.inputs)}$"):
            cpp_bindings.CudaLaunch(EXCHANGE, 0, name, arrays, arrays, [])
        with pytest.raises(ValueError, match=f"{name}: outputs: got 13; allowed: {outputs}$"):
            cpp_bindings.CudaLaunch(EXCHANGE, 0, name, arrays[: len(op.inputs)], arrays, [])
        with pytest.raises(ValueError, match=f"{name}: attrs: got 9; allowed: {attrs}$"):
            cpp_bindings.CudaLaunch(EXCHANGE, 0, name, arrays[: len(op.inputs)], arrays[:outputs], [0] * 9)


SPILLED = {
    "backward_rowsINS_6SwiGLU": 48,
    "backward_rows": 32,
    "backward_tilesILb1ELb1ELi16ENS_6SwiGLU": 40,
    "backward_tilesILb1": 24,
    "4meetE": 32,
    "grouped_gemm_bf16INS2_4KindILb0": 8,
}
"""Bytes a thread may spill. SwiGLU's gradient along rows runs 512 threads of 128 registers; spilling this much it
reaches 0.94 of a copy's bandwidth on an H200. With a limit it spills 8 on sm_90a and 48 on sm_100a. Along both, 24 on
sm_100a alone, of addresses of a strip's end: in a loop that needs none it is 1.4% slower on an H200. With h besides, 8
on sm_90a, 0.77 to 0.80 of a copy; with a limit too, 40, not timed. The barrier of peers has the
arguments of printf there. The scheduling warp of the bf16 products of rows spills one value per tile, of 24 registers:
with this warp 256 rows per expert take 0.96 of their time, 1536 and more 0.99 to 1.01."""


def spilled(name: str) -> int:
    return next((nbytes for kernel, nbytes in SPILLED.items() if kernel in name), 0)


def test_kernels_spill_nothing_but_what_was_measured_to_be_faster() -> None:
    for (target, name), usage in kernels("--dump-resource-usage").items():
        used = {what: int(nbytes) for what, nbytes in re.findall(r"(STACK|LOCAL):(\d+)", usage)}
        assert used["LOCAL"] == 0, (target, name)
        assert used["STACK"] <= spilled(name), (target, name)


@pytest.mark.slow  # cuobjdump prints the instructions in 15 s
@pytest.mark.parametrize("target", sorted(TARGETS))
def test_the_hardware_converts_and_nothing_flushes_subnormals(target: str) -> None:
    sass = {name: code for (of, name), code in kernels("-sass").items() if of == target}
    for name, code in sass.items():
        # Integer division uses F2I.FTZ and MUFU, without subnormals. Where fp32 is divided, CUDA finds infinities and
        # NaN by comparisons and a sum, and scales subnormals before.
        flushing = "FMUL|FFMA|FMNMX|HADD2|HMUL2|HFMA2" + ("" if "BlockwiseRows" in name else "|FADD|FSETP")
        assert not re.search(rf"\b({flushing})\.\S*FTZ", code), name
        assert spilled(name) or not re.search(r"\b(STL|LDL)\b", code), name
    assert any("E4M3" in code for code in sass.values())


SUMS = {"quantize_tiles": 0, "quantize_persistent": 0, "swiglu_tiles": 0, "backward_rows": 64, "backward_tiles": 32}
"""The fma of dprob's sums, of two passes or of one. SwiGLU has seven more for each sigmoid of its table: a polynomial's
and a reciprocal's."""


@pytest.mark.slow
@pytest.mark.parametrize("target", sorted(TARGETS))
@pytest.mark.parametrize("kernel", SUMS)
def test_a_product_is_not_fused_into_a_sum(kernel: str, target: str) -> None:
    """-fmad=false: the only fma are explicit in the source."""
    codes = [c for (of, name), c in kernels("-sass").items() if of == target and kernel in name]
    assert any("FMUL" in code for code in codes)
    for code in codes:
        sigmoids, rest = divmod(len(re.findall(r"\bFFMA\b", code)) - SUMS[kernel], 7)
        assert rest == 0
        assert (sigmoids > 0) == (not kernel.startswith("quantize"))


@pytest.mark.slow
def test_the_folded_products_are_fp8_tensor_core_instructions_of_hopper() -> None:
    """Two products of four steps per stage; M-grouped also one, of rows that end in the first half; K-grouped also of
    one, two and three steps of a group's last stage; multicast copies, and code for no other architecture."""
    of = {key: code for key, code in kernels("-sass").items() if "grouped_gemm_fp8_nt" in key[1]}
    assert len(of) == 16, (
        "M-grouped: alone, bias, second product, scales of blocks, their second product, pair; K-grouped: alone, pair; "
        "in bf16 and fp32"
    )
    for (target, name), code in of.items():
        assert target == "sm_90a"
        steps = 4 + (3 + 2 + 1 if "SpanScales" in name else 0)
        ends = 4 if "RowScales" in name else 0
        assert len(re.findall(r"\bQGMMA\.64x128x32\.F32\.E4M3\.E4M3\b", code)) == 2 * steps + ends, name
        assert "UTMALDG.2D.MULTICAST" in code, name
    assert "its CUDA kernel was compiled for sm_90," in cpp_bindings.why_not_cuda("grouped_mm_fold", (10, 0))


@pytest.mark.slow
def test_the_bf16_products_are_tensor_core_instructions_of_hopper_for_either_layout() -> None:
    """Operands with a contiguous contraction dim, or (tokens, N) and (tokens, K), which the tensor core transposes."""
    of = {key: code for key, code in kernels("-sass").items() if "grouped_gemm_bf16" in key[1]}
    assert len(of) == 10, "M-grouped with either layout of the weights, a sum, K-grouped with either, in bf16 and fp32"
    transposed = []
    for (target, name), code in of.items():
        assert target == "sm_90a"
        products = re.findall(r"\bHGMMA\.64x256x16\.F32\.BF16 R\d+, gdesc\[\w+\](\S*),", code)
        assert products, name
        transposed.append(products[0])
        assert set(products) == {transposed[-1]}, name
        assert "UTMALDG.2D.MULTICAST" in code, name
    assert sorted(transposed) == sorted(["", "", ".tnspB", ".tnspB"] * 2 + [".tnspA.tnspB"] * 2)
    assert "its CUDA kernel was compiled for sm_90," in cpp_bindings.why_not_cuda("grouped_mm_bf16", (10, 0))


def bound() -> cpp_bindings.CudaLaunch:
    launch = quantize.quantize_col.launch(quantize.ArrayType((32, 32), "bfloat16"), arch="sm_90")
    return cpp_bindings.CudaLaunch(EXCHANGE, 0, "quantize_col", [((32, 32), "bfloat16")], launch.out, launch.cuda_attrs)


def test_a_bound_launch_refuses_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="quantize_col: inputs: got 2; allowed: 1"):
        bound()((EMPTY, EMPTY), (EMPTY,))
    with pytest.raises(ValueError, match="quantize_col: outputs: got 1; allowed: 2"):
        bound()((EMPTY,), (EMPTY,))
    with pytest.raises(TypeError, match="quantize_col: arrays: got a str; allowed: dense arrays"):
        bound()((EMPTY,), (EMPTY, "q"))
    with pytest.raises(ValueError, match="CudaLaunch: name: got 'fold'; allowed: "):
        cpp_bindings.CudaLaunch(EXCHANGE, 0, "fold", [], [], [])
    with pytest.raises(TypeError, match="quantize_col: dtype: got float16; allowed: uint8, int32"):
        cpp_bindings.CudaLaunch(EXCHANGE, 0, "quantize_col", [((32, 32), "float16")], [((32, 32), "uint8")] * 2, [0, 0])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, which addresses of the CPU would upset")
def test_without_a_driver_the_module_imports_and_a_launch_says_what_cuda_says() -> None:
    with pytest.raises(RuntimeError, match=r"CUDA(.|\n)*cudaError\w+"):
        bound()((EMPTY,), (EMPTY, EMPTY))


def test_why_an_op_has_no_cuda_kernel() -> None:
    assert cpp_bindings.why_not_cuda("quantize_col", (9, 0)) == ""
    assert "no CUDA kernel for it" in cpp_bindings.why_not_cuda("row_map", (9, 0))
    assert "compiled for sm_90, sm_100, this is sm_120" in cpp_bindings.why_not_cuda("quantize_col", (12, 0))
