"""What runs an op: the device, what is forced, the sizes; decided once per layouts."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from unittest import mock

import pytest
import torch
from mxep import cpp_bindings
from mxep.core_kernels.quantize import plan as quantize
from mxep.torch_frontend import _call, _device, _launch, capabilities, force_implementation, ops
from torch import Tensor

from .inputs import ints, rows


def test_what_runs_and_why_the_rest_does_not() -> None:
    on_cpu = capabilities("cpu")
    assert set(on_cpu) == set(ops.OPS)
    assert on_cpu["quantize_row"].uses == "cpp"
    assert "torch.matmul" in on_cpu["grouped_mm_mx"].uses
    assert "interpreter" in on_cpu["quantize_row"].absent["triton"]
    nothing = capabilities("meta")["quantize_row"]
    assert nothing.uses == ""
    assert set(nothing.absent) == {"cpp", "cuda", "triton"}


def test_a_forced_implementation_runs_or_raises() -> None:
    x = rows(2, 64)
    with force_implementation("triton"), pytest.raises(NotImplementedError, match=r"quantize_row: device: .*INTERPRET"):
        ops.quantize_row(x)
    with (
        force_implementation("cuda"),
        pytest.raises(NotImplementedError, match=r"quantize_row: .*allowed: cuda tensor"),
    ):
        ops.quantize_row(x)
    with force_implementation("cpp"):
        forced = ops.quantize_row(x)
    assert torch.equal(forced[0], ops.quantize_row(x)[0])
    with (
        pytest.raises(ValueError, match="force_implementation: implementation: got 'c'; allowed: 'cpp', 'cuda', 't"),
        force_implementation("c"),
    ):
        pass
    with pytest.raises(NotImplementedError, match="quantize_row: device: got meta"):
        _call.call(quantize.quantize_row, x.to("meta"))


INTERPRETED = """
import torch
import torch._dynamo.testing
from mxep.torch_frontend import capabilities, force_implementation, ops
x = torch.randn(33, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
ids = torch.tensor([2, 0, 1, 2], dtype=torch.int32)
runs = [
    lambda: ops.quantize_row(x),
    lambda: ops.sort_by_expert(ids, 3),
    lambda: (ops.permute_rows(x, ids),),
    lambda: ops.quantize_both_fold(x[:32], ids[1:2] + 32),
]
for run in runs:
    want = run()
    with force_implementation("triton"):
        assert capabilities()["quantize_row"].uses == "triton, interpreter"
        assert capabilities()["quantize_both_fold"].uses == "quantize_row_fold, quantize_col, fold_groups"
        assert all(torch.equal(g, w) for g, w in zip(run(), want, strict=True))
"""


def test_triton_runs_on_a_cpu_under_its_interpreter() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    run = subprocess.run([sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


@pytest.fixture
def capability() -> Iterator[Callable[[int, int], None]]:
    """Sets the compute capability of the GPU that this machine need not have."""
    with mock.patch.object(torch.cuda, "get_device_capability") as ask:
        _device.compute_capability.cache_clear()
        yield lambda major, minor: setattr(ask, "return_value", (major, minor))
        _device.compute_capability.cache_clear()


@pytest.mark.parametrize(
    ("gpu", "from_the_table", "from_triton"),
    [
        ((8, 9), "triton, sm_89 with the tiles of sm_90", "triton, sm_89 with the tiles of sm_90"),
        ((9, 0), "cuda, sm_90", "triton, sm_90"),
        ((10, 0), "cuda, sm_100", "triton, sm_100"),
        ((10, 3), "triton, sm_103 with the tiles of sm_100", "triton, sm_103 with the tiles of sm_100"),
        ((12, 0), "triton, sm_120 with the tiles of sm_90", "triton, sm_120 with the tiles of sm_90"),
    ],
)
def test_the_device_decides(capability: Callable, gpu: tuple[int, int], from_the_table: str, from_triton: str) -> None:
    capability(*gpu)
    found = capabilities("cuda:0")
    assert (found["quantize_col"].uses, found["row_map"].uses) == (from_the_table, from_triton)
    with force_implementation("triton"):
        assert capabilities("cuda:0")["quantize_col"].uses == from_triton


def test_triton_sorts_by_more_experts_than_the_cuda_kernel_takes(capability: Callable) -> None:
    capability(9, 0)

    def sort_by(num_experts: int, forced: _device.Implementation | None = None) -> object:
        layouts = ((torch.Size([64]), torch.int32, torch.device("cuda", 0), (1,)),)
        return _launch.decide(ops.OPS["sort_by_expert"], layouts, forced, num_experts=num_experts).start

    with (
        mock.patch.object(_launch, "_cuda", return_value="cuda"),
        mock.patch.object(_launch, "_triton", return_value="triton"),
    ):
        assert (sort_by(4096), sort_by(4097), sort_by(4096, "triton")) == ("cuda", "triton", "triton")
        with pytest.raises(NotImplementedError, match="allowed: triton; its CUDA kernel takes up to 4096 experts"):
            sort_by(4097, "cuda")


def test_a_gpu_that_nothing_was_compiled_for_says_what_runs_instead(capability: Callable) -> None:
    capability(8, 0)
    assert "sm_80; allowed: sm_89 and newer; on a CPU the C++" in capabilities("cuda:0")["row_map"].absent["triton"]
    capability(12, 0)
    _device.compute_capability.cache_clear()
    assert "compiled for sm_90, sm_100, this is sm_120" in capabilities("cuda:0")["quantize_col"].absent["cuda"]
    capability(9, 0)
    _device.compute_capability.cache_clear()
    with mock.patch.object(cpp_bindings, "cuda_archs", ()):
        built_without = capabilities("cuda:0")["quantize_col"]
        composed = capabilities("cuda:0")["quantize_both_fold"]
    assert built_without.uses == "triton, sm_90"
    assert "`make install-gpu`" in built_without.absent["cuda"]
    assert composed.uses == "quantize_row_fold, quantize_col, fold_groups"
    assert set(composed.absent) == {"cpp", "cuda"}


@pytest.mark.parametrize("ends", [(32, 32, 64), (512, 640), (0,)])
def test_composed_both_fold_has_the_bytes_of_its_kernel(ends: tuple[int, ...]) -> None:
    op, x = ops.OPS["quantize_both_fold"], rows(672, 64)
    for options in ({}, {"rounding": 1, "satfinite": True}):
        composed = _call.COMPOSED[op](x, ints(*ends), **options)
        for got, want in zip(composed, ops.quantize_both_fold(x, ints(*ends), **options), strict=True):
            assert torch.equal(got, want)


def test_what_a_kernel_needs_besides_its_outputs_is_let_go() -> None:
    """As on a GPU, where the plan of quantize_both_fold has an output more than the op."""
    op, x, ends = ops.OPS["quantize_both_fold"], rows(32, 64), ints(32)
    want = ops.quantize_both_fold(x, ends)
    types = tuple(_launch.array_type(t.shape, t.dtype) for t in (x, ends))
    outputs = _launch.Outputs.of(op.plan(*types, arch="sm_90").out)
    assert len(outputs.shapes) == len(want) + 1

    def start(inputs: tuple[Tensor, ...], written: tuple[Tensor, ...]) -> None:
        for out, value in zip(written[:-1], want, strict=True):
            out.copy_(value)

    with mock.patch.object(_call, "bind", return_value=_launch.Bound("cpu", None, {}, outputs, start)):
        got = ops.quantize_both_fold(x, ends)
    assert len(got) == len(want)
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


def test_what_runs_an_op_is_decided_once_per_layouts_in_use() -> None:
    """Layouts in use are known for as long as others come and go, and memory is bounded."""
    with (
        mock.patch.object(_launch, "_known", _launch.Known()) as known,
        mock.patch.object(_launch.Known, "MOST", 2),
        mock.patch.object(_launch, "decide", wraps=_launch.decide) as decide,
    ):
        for m, decided in ((1, 1), (1, 1), (2, 2), (1, 2), (3, 3), (1, 3), (4, 4), (1, 4), (5, 5), (1, 5), (3, 6)):
            q, _ = ops.quantize_row(rows(m, 32))
            assert (q.shape, decide.call_count) == ((m, 32), decided)
            assert len(known.recent) + len(known.former) <= 4


def test_what_dlpack_has_no_words_for_is_refused_in_ours() -> None:
    x = torch.empty(2, 32, dtype=torch.bits16)
    assert cpp_bindings.Exchange(Tensor).layouts((x,)) is None
    with pytest.raises(TypeError, match="quantize_row: x: got dtype bits16; allowed: bfloat16 or float32"):
        ops.quantize_row(x)
