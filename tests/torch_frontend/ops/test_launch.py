"""What runs an op: the device, the forced implementation, the sizes; prepared once per layouts."""

from collections.abc import Callable, Iterator
from unittest import mock

import pytest
import torch
from mxep import cpp_bindings
from mxep.core_kernels.fold.both import plan as plan_both
from mxep.core_kernels.quantize import plan as quantize
from mxep.torch_frontend import capabilities, force_implementation, ops
from mxep.torch_frontend.ops import call as calls
from mxep.torch_frontend.ops import device
from mxep.torch_frontend.ops import launch as launches
from torch import Tensor

from ..inputs import ints, rows


def test_what_runs_and_why_the_rest_does_not() -> None:
    on_cpu = capabilities("cpu")
    assert set(on_cpu) == set(ops.OPS)
    assert on_cpu["quantize_row"].uses == "cpp"
    assert "torch.matmul" in on_cpu["grouped_mm_mx"].uses
    assert "interpreter" in on_cpu["quantize_row"].absent["triton"]
    nothing = capabilities("meta")["quantize_row"]
    assert nothing.uses == ""
    assert set(nothing.absent) == {"cpp", "cuda", "triton"}
    for name in ("xla", "hpu", "abacus"):
        with pytest.raises(ValueError, match=f"capabilities: device: got '{name}'; allowed: a torch.device"):
            capabilities(name)


def test_a_forced_implementation_runs_or_raises() -> None:
    x = rows(2, 64)
    with force_implementation("triton"), pytest.raises(NotImplementedError, match=r"quantize_row: device: .*INTERPRET"):
        ops.quantize_row(x)
    with (
        force_implementation("cuda"),
        pytest.raises(NotImplementedError, match=r"quantize_row: device: got cpu with 'cuda' .*allowed: a GPU"),
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
        calls.call(quantize.quantize_row, x.to("meta"))


@pytest.fixture
def capability() -> Iterator[Callable[[int, int], None]]:
    """Sets the compute capability of the GPU that this machine need not have."""
    with mock.patch.object(torch.cuda, "get_device_capability") as ask:
        device.compute_capability.cache_clear()
        yield lambda major, minor: setattr(ask, "return_value", (major, minor))
        device.compute_capability.cache_clear()


def test_triton_sorts_by_more_experts_than_the_cuda_kernel_takes(capability: Callable) -> None:
    capability(9, 0)

    def sort_by(num_experts: int, forced: device.Implementation | None = None) -> object:
        layouts = ((torch.Size([64]), torch.int32, torch.device("cuda", 0), (1,)),)
        return launches.prepare_uncached(ops.OPS["sort_by_expert"], layouts, forced, num_experts=num_experts).runner

    with (
        mock.patch.object(cpp_bindings, "why_not_cuda", return_value=""),
        mock.patch.object(cpp_bindings, "CudaLaunch", return_value="cuda"),
        mock.patch.object(launches, "_triton", return_value="triton"),
    ):
        assert (sort_by(4096), sort_by(4097), sort_by(4096, "triton")) == ("cuda", "triton", "triton")
        with pytest.raises(NotImplementedError, match="allowed: triton; its CUDA kernel takes up to 4096 experts"):
            sort_by(4097, "cuda")


@pytest.mark.parametrize("name", ["quantize_matrix_fold", "quantize_matrix_fold_t"])
def test_weights_in_fp32_are_folded_in_parts(capability: Callable, name: str) -> None:
    """CUDA C++ takes bf16."""
    capability(9, 0)

    def prepared(dtype: torch.dtype, shape: tuple[int, ...], forced: device.Implementation | None = None) -> object:
        layouts = [(torch.Size(shape), dtype, torch.device("cuda", 0), torch.empty(shape, device="meta").stride())]
        return launches.prepare_uncached(ops.OPS[name], layouts, forced).runner

    with (
        mock.patch.object(cpp_bindings, "why_not_cuda", return_value=""),
        mock.patch.object(cpp_bindings, "CudaLaunch", side_effect=lambda *arguments: arguments[-1]),
    ):
        assert prepared(torch.bfloat16, (64, 2048, 2048)) == (0, 0)
        assert prepared(torch.float32, (64, 2048, 2048)) is None
        with pytest.raises(NotImplementedError, match="allowed: triton; its CUDA kernel takes bfloat16"):
            prepared(torch.float32, (64, 2048, 2048), "cuda")


def test_a_build_without_cuda_kernels_runs_triton(capability: Callable) -> None:
    capability(9, 0)
    with mock.patch.object(cpp_bindings, "cuda_archs", ()):
        built_without = capabilities("cuda:0")["quantize_col"]
        composed = capabilities("cuda:0")["quantize_both_fold"]
    assert built_without.uses == "triton, sm_90"
    assert "`make install-gpu`" in built_without.absent["cuda"]
    assert composed.uses == "quantize_row_fold, quantize_col, fold_groups"
    assert set(composed.absent) == {"cpp", "cuda"}


@pytest.mark.parametrize("ends", [(32, 32, 64), (512, 640), (0,)])
@pytest.mark.parametrize("name", ["quantize_both_fold", "swiglu_bwd_fold"])
def test_a_composed_fold_has_the_bytes_of_its_kernel(name: str, ends: tuple[int, ...]) -> None:
    op, x = ops.OPS[name], rows(672, 64)
    arrays = (x, ints(*ends)) if name == "quantize_both_fold" else (x, x, x, torch.ones(672), ints(*ends))
    for options in ({}, {"rounding": 1, "satfinite": True}):
        composed = op.compose(calls.call, *arrays, **options)
        want = getattr(ops, name)(*arrays, **options)
        for one, other in zip(*(op.specified(arrays, found) for found in (composed, want)), strict=True):
            assert torch.equal(one, other)


def test_scratch_memory_is_allocated_and_dropped(capability: Callable) -> None:
    """quantize_both_fold on Hopper, with a launch that records what it gets."""
    capability(9, 0)
    op, x, ends = ops.OPS["quantize_both_fold"], rows(32, 64), ints(32)
    want = ops.quantize_both_fold(x, ends)

    def write(inputs: tuple[Tensor, ...], written: tuple[Tensor, ...]) -> None:
        for out, value in zip(written[:-1], want, strict=True):
            out.copy_(value)

    gpu = torch.device("cuda", 0)
    layouts = [(t.shape, t.dtype, gpu, t.stride()) for t in (x, ends)]
    with (
        mock.patch.object(cpp_bindings, "why_not_cuda", return_value=""),
        mock.patch.object(cpp_bindings, "CudaLaunch", return_value=write) as launch,
    ):
        call = launches.prepare_uncached(op, layouts, None)
    written, attrs = launch.call_args.args[4:]
    assert len(written) == len(want) + 1
    assert attrs == (0, 0, plan_both.POLLS)
    assert call.outputs.shapes[-1] == (plan_both.scratch_bytes(32, 64, 1, "bfloat16"),)
    with (
        mock.patch.multiple(launches.known_calls, recent={}, former={}),
        mock.patch.object(calls, "prepare", return_value=call._replace(arch="cpu", index=None)),
    ):
        got = ops.quantize_both_fold(x, ends)
    assert len(got) == len(want)
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


def test_a_call_is_prepared_once_per_layouts_in_use() -> None:
    """Layouts in use stay cached while others come and go, and memory is bounded."""
    with (
        mock.patch.multiple(launches.known_calls, recent={}, former={}),
        mock.patch.object(launches.PreparedCalls, "MOST", 2),
        mock.patch.object(launches, "prepare_uncached", wraps=launches.prepare_uncached) as prepare,
    ):
        for m, decided in ((1, 1), (1, 1), (2, 2), (1, 2), (3, 3), (1, 3), (4, 4), (1, 4), (5, 5), (1, 5), (3, 6)):
            q, _ = ops.quantize_row(rows(m, 32))
            assert (q.shape, prepare.call_count) == ((m, 32), decided)
            assert len(launches.known_calls.recent) + len(launches.known_calls.former) <= 4


def test_what_dlpack_has_no_words_for_is_refused_in_ours() -> None:
    x = torch.empty(2, 32, dtype=torch.bits16)
    assert cpp_bindings.Exchange(Tensor).layouts((x,)) is None
    with pytest.raises(TypeError, match="quantize_row: x: got dtype bits16; allowed: bfloat16 or float32"):
        ops.quantize_row(x)
