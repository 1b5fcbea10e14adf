"""The implementation that each op runs on each GPU: one table for dispatch.py and for both frontends."""

import re
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from unittest import mock

import jax
import pytest
import torch
from mxep import cpp_bindings
from mxep.core_kernels import dispatch
from mxep.core_kernels.dispatch import IMPLEMENTATIONS, Device, Implementation
from mxep.core_kernels.launch import KernelOp
from mxep.jax_frontend.ops import device as jax_device
from mxep.torch_frontend import ops
from mxep.torch_frontend.ops import device as torch_device

CUDA_OPS = {"quantize_col": ((9, 0), (10, 0)), "quantize_both_fold": ((9, 0), (10, 0)), "grouped_mm_fold": ((9, 0),)}
"""The CUDA table of the tests, whatever the build has."""

TILES = {(8, 9): "sm_90", (9, 0): "sm_90", (10, 0): "sm_100", (10, 3): "sm_100", (12, 0): "sm_90"}
"""Capability -> the architecture that Triton kernels are planned for."""
REFUSED = [(8, 0), (11, 0), (13, 0)]
FORCED = (None, *IMPLEMENTATIONS)


def expected(op: KernelOp, capability: tuple[int, int], forced: Implementation | None) -> tuple[str, str] | str:
    """The choice, or the value in the error."""
    if capability in REFUSED:
        return "sm_{}{}.*; allowed: sm_89, sm_90, sm_100, sm_103, sm_120, sm_121; on a CPU".format(*capability)
    if forced == "cpp":
        return "with 'cpp' forced; allowed: a CPU"
    compiled = capability in CUDA_OPS.get(op.name, ())
    if forced == "cuda" and not compiled:
        return "with 'cuda' forced; allowed: triton; "
    return "cuda" if compiled and forced != "triton" else "triton", TILES[capability]


def from_torch(op: KernelOp, capability: tuple[int, int], forced: Implementation | None) -> object:
    torch_device.compute_capability.cache_clear()
    with mock.patch.object(torch.cuda, "get_device_capability", return_value=capability):
        return torch_device.choose(op, torch.device("cuda", 0), forced)


def from_jax(op: KernelOp, capability: tuple[int, int], forced: Implementation | None) -> object:
    gpu = SimpleNamespace(compute_capability="{}.{}".format(*capability))
    with mock.patch.object(jax, "devices", return_value=[gpu]):
        return jax_device.choose(op, "cuda", forced)


@pytest.fixture(autouse=True)
def cuda_table() -> Iterator[None]:
    with (
        mock.patch.object(cpp_bindings, "cuda_archs", ((9, 0), (10, 0))),
        mock.patch.object(cpp_bindings, "cuda_op_archs", CUDA_OPS),
        mock.patch.object(cpp_bindings, "CUDA_OPS", tuple(CUDA_OPS)),
    ):
        yield
    torch_device.compute_capability.cache_clear()


@pytest.mark.parametrize("capability", [*TILES, *REFUSED])
@pytest.mark.parametrize("frontend", [from_torch, from_jax])
def test_a_gpu_has_one_answer_in_both_frontends(frontend: Callable, capability: tuple[int, int]) -> None:
    for op in ops.OPS.values():
        for forced in FORCED:
            want = expected(op, capability, forced)
            if isinstance(want, str):
                with pytest.raises(NotImplementedError, match=f"{op.name}: device: got .*{want}"):
                    frontend(op, capability, forced)
            else:
                assert frontend(op, capability, forced) == want


def test_sizes_that_cuda_does_not_take_run_in_triton() -> None:
    op, reason = ops.OPS["quantize_col"], "allowed: triton; too wide"
    gpu = Device("cuda:0", "cuda", (9, 0))
    assert dispatch.choose(op, gpu, None, no_cuda=reason) == ("triton", "sm_90")
    with pytest.raises(NotImplementedError, match=r"quantize_col: device: got cuda:0 with 'cuda' forced; .* too wide"):
        dispatch.choose(op, gpu, "cuda", no_cuda=reason)


@pytest.mark.parametrize("forced", FORCED)
def test_a_cpu_runs_cpp_and_nothing_else(forced: Implementation | None) -> None:
    for op in ops.OPS.values():
        for choose in (
            lambda op=op: torch_device.choose(op, torch.device("cpu"), forced),
            lambda op=op: jax_device.choose(op, "cpu", forced),
        ):
            if forced in (None, "cpp"):
                assert choose() == ("cpp", "cpu")
            else:
                with pytest.raises(NotImplementedError, match=f"{op.name}: device: got cpu with '{forced}' forced"):
                    choose()


@pytest.mark.parametrize(
    ("capability", "name", "folds", "upcasts"),
    [
        ((8, 0), "sm_80", False, False),
        ((8, 9), "sm_89", False, False),
        ((9, 0), "sm_90", True, True),
        ((10, 0), "sm_100", False, False),
        ((12, 0), "sm_120", False, False),
        ((13, 0), "sm_130", False, False),
    ],
)
def test_hopper_alone_folds_and_upcasts(capability: tuple[int, int], name: str, folds: bool, upcasts: bool) -> None:
    assert dispatch.arch_name(capability) == name
    assert (dispatch.facts(name).folds, dispatch.facts(name).upcasts) == (folds, upcasts)


def capability_of(name: str, gpu: tuple[int, int], no_cuda: str = "") -> str:
    return dispatch.capability(ops.OPS[name], Device("cuda:0", "cuda", gpu), None, no_cuda).uses


def test_capabilities_name_what_runs_and_whose_tiles_it_takes() -> None:
    assert capability_of("quantize_col", (9, 0)) == "cuda, sm_90"
    assert capability_of("quantize_col", (9, 0), "none") == "triton, sm_90"
    assert capability_of("quantize_col", (10, 3), "none") == "triton, sm_103 with the tiles of sm_100"
    assert capability_of("quantize_col", (12, 0), "none") == "triton, sm_120 with the tiles of sm_90"
    assert capability_of("quantize_both_fold", (9, 0), "none") == "quantize_row_fold, quantize_col, fold_groups"
    assert capability_of("quantize_col", (8, 0)) == ""
    cpu = dispatch.capability(ops.OPS["grouped_mm_mx"], Device("cpu", "cpu"), None, matmul="matmul")
    assert cpu.uses == "matmul on operands dequantized in C++"
    assert set(cpu.absent) == {"cpp", "cuda"}


def test_a_device_that_is_neither_cpu_nor_gpu_runs_nothing() -> None:
    meta = Device("meta", "meta")
    assert set(dispatch.absent(meta)) == set(IMPLEMENTATIONS)
    with pytest.raises(NotImplementedError, match="quantize_row: device: got meta; allowed: cpu and cuda"):
        dispatch.choose(ops.OPS["quantize_row"], meta, None)


def warnings_of(frontend: Callable, capability: tuple[int, int], forced: Implementation | None) -> list[str]:
    """The warnings of two choices, as Python's filter shows them: once per line of code."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.resetwarnings()
        vars(torch_device).pop("__warningregistry__", None)
        vars(jax_device).pop("__warningregistry__", None)
        for name in ("quantize_row", "quantize_col"):
            frontend(ops.OPS[name], capability, forced)
    return [f"{warning.category.__name__}: {warning.message}" for warning in caught]


@pytest.mark.parametrize("frontend", [from_torch, from_jax])
def test_a_build_without_cuda_kernels_warns_once_on_hopper(frontend: Callable) -> None:
    assert warnings_of(frontend, (9, 0), None) == []
    with mock.patch.object(cpp_bindings, "cuda_archs", ()):
        (told,) = warnings_of(frontend, (9, 0), None)
        for capability, forced in (((9, 0), "triton"), ((8, 9), None), ((10, 0), None), ((12, 0), None)):
            assert warnings_of(frontend, capability, forced) == [], (capability, forced)
        cpp_bindings.warn_without_cuda(None)  # a CPU
    assert re.match("RuntimeWarning: mxep: this build has no CUDA kernels, so Triton runs every op on this sm_90", told)
    for fact in ("commit 95fb47a", "commit f2edb52", "no stored measurement", "`make install-gpu`", "nvcc 13.0", "580"):
        assert fact in told
