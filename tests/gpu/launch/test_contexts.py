"""CUDA state outside the arrays: errors of other libraries, and green contexts of one device."""

import ctypes
import subprocess
import sys
import threading

import pytest
import torch
from mxep import cpp_bindings
from mxep.torch_frontend import ops
from torch import Tensor
from torch.cuda.green_contexts import GreenContext

from ..cases import CASES, same_bytes

EXCHANGE = cpp_bindings.Exchange(Tensor)


def x() -> Tensor:
    return torch.ones(64, 64, dtype=torch.bfloat16, device="cuda")


def torch_cudart() -> ctypes.CDLL:
    with open("/proc/self/maps") as maps:
        path = next(line.split()[-1] for line in maps if "libcudart" in line)
    return ctypes.CDLL(path)


def test_an_error_of_another_library_is_neither_raised_nor_cleared() -> None:
    cudart, rows, want = torch_cudart(), x(), ops.quantize_col(x())
    torch.cuda.synchronize()
    error = cudart.cudaSetDevice(12345)
    assert error != 0
    got = ops.quantize_col(rows)
    assert cudart.cudaGetLastError() == error
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


def test_a_failed_launch_raises_once() -> None:
    """A launch of zero CTAs; the frontends never make one."""
    none = torch.empty(0, 32, dtype=torch.bfloat16, device="cuda")
    out = torch.empty(32, 0, dtype=torch.uint8, device="cuda")
    types = [((0, 32), "bfloat16")], [((32, 0), "uint8")] * 2
    launch = cpp_bindings.CudaLaunch(EXCHANGE, none.device.index, "quantize_col", *types, [0, 0])
    with pytest.raises(RuntimeError, match=r"quantize_col: CUDA: .*cudaErrorInvalid"):
        launch((none,), (out, out))
    ops.quantize_col(x())
    torch.cuda.synchronize()


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("grouped")])
def test_an_op_is_the_first_call_of_a_new_thread(name: str) -> None:
    """A thread without a CUDA context, as autograd's are before their first runtime call. The output's memory is in
    torch's cache, so that its allocation makes no such call."""
    case = CASES[name]
    inputs = case.inputs()
    want, again, got = case.torch(*inputs), case.torch(*inputs), []
    torch.cuda.synchronize()
    del again
    thread = threading.Thread(target=lambda: got.append(case.torch(*inputs)))
    thread.start()
    thread.join()
    assert got, "the thread raised"
    same_bytes(got[0], want)


GREEN_FIRST = """
import time
import torch
from mxep.torch_frontend import ops
from torch.cuda.green_contexts import GreenContext

n = 4096
a, b = torch.randn(n, n, device="cuda").bfloat16(), torch.randn(2, n, n, device="cuda").bfloat16()
ends = torch.tensor([n // 2, n], dtype=torch.int32, device="cuda")
torch.cuda.synchronize()

def gemm():
    begin = time.perf_counter()
    out = ops.grouped_mm_bf16(a, b, ends)
    torch.cuda.current_stream().synchronize()
    return out, time.perf_counter() - begin

green = GreenContext.create(num_sms=8, device_id=torch.cuda.current_device())
green.set_context()
few, few_s = min((gemm() for _ in range(5)), key=lambda run: run[1])
green.pop_context()
torch.cuda.synchronize()
whole, whole_s = min((gemm() for _ in range(9)), key=lambda run: run[1])
assert torch.equal(few, whole)
print(f"8 SMs: {few_s * 1e3:.2f} ms, the device: {whole_s * 1e3:.2f} ms")
assert few_s > 4 * whole_s
"""


def test_a_gemm_uses_the_whole_device_after_a_first_run_in_a_green_context() -> None:
    run = subprocess.run([sys.executable, "-c", GREEN_FIRST], capture_output=True, text=True, timeout=120)
    print(run.stdout)
    assert run.returncode == 0, run.stdout + run.stderr[-4000:]


@pytest.mark.parametrize("sms", [8, 56, 112])
def test_products_have_the_same_bytes_at_any_width(sms: int) -> None:
    """A green context limits the width of a launch: the other SMs are free for concurrent work."""
    context = GreenContext.create(num_sms=sms, device_id=torch.cuda.current_device())
    for case in (case for name, case in CASES.items() if name.startswith("grouped")):
        inputs = case.inputs(m=3072)
        want = case.torch(*inputs, m=3072)
        torch.cuda.synchronize()
        context.set_context()
        try:
            got = case.torch(*inputs, m=3072)
            torch.cuda.current_stream().synchronize()
        finally:
            context.pop_context()
        same_bytes(got, want)
