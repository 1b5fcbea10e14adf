"""Expert parallelism over gloo, four processes at once; the checks themselves are in ep_ranks.py."""

import gc
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from mxep.torch_frontend import ExpertParallel, MXTensor
from mxep.torch_frontend.exchange.route import Route
from mxep.torch_frontend.integrations.torchao import (
    a2a_combine_hp_fwd_mxfp8_bwd,
    a2a_dispatch_mxfp8_fwd_hp_bwd,
    to_mxfp8_a2a_dequant,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from ..forked import run_ranks
from .ep_repeated import OVER_RANKS

RANKS = 4
SCRIPT = Path(__file__).with_name("ep_ranks.py")
RECIPES = (
    "bf16",
    "mxfp8",
    "mxfp8_wgrad_with_hp",
    "fp8_rowwise",
    "fp8_blockwise",
    "mxfp8 folded",
    "mxfp8 in all transfers",
)
DEGREES = [
    f"equal_to_dense[{ep}-{run}-{prob_in}]" for ep in (1, 2, 4) for run in RECIPES for prob_in in ("combine", "swiglu")
]
OVERLAPPED = [
    "routings",
    "weights inside",
    *(f"recipe {recipe}" for recipe in (*RECIPES, "bf16 in all transfers")),
    "frozen weights",
    "cached weights",
    "products of rows",
    "products of rows, all transfers",
    "products of replicas",
    "folded products",
]
CHECKS = [
    *DEGREES,
    "reload_between_degrees",
    "tutorial_flow",
    "empty_rank_and_hot_expert",
    "wire_of_a2a_dequant",
    "dispatch_is_one_collective",
    "a_token_is_quantized_once",
    "several_layers_and_recomputation",
    "saved_of_sharded_experts",
    "nothing_saved_of_gathered_weights",
    "writes_to_the_local_part",
    "collectives_on_the_weight",
    "ranks_train_as_one_process[2-mxfp8_wgrad_with_hp-mean-combine]",
    "ranks_train_as_one_process[4-mxfp8-mean-swiglu]",
    "ranks_train_as_one_process[2-bf16-sum-combine]",
    "ranks_train_as_one_process[2-bf16-mean-input]",
    "sharded_twice[bf16]",
    "sharded_twice[mxfp8]",
    "sharded_twice[overlapped]",
    "one_norm_one_optimizer",
    "saved_moved_and_cast",
    *(f"overlapped[{ep}-{name}]" for ep in (2, 4) for name in OVERLAPPED),
    "overlapped_layer[2-combine]",
    "overlapped_layer[4-swiglu]",
    *(f"replicas[{ep}-{name}]" for ep in (2, 4) for name in ("routings", "recipes", "subset")),
    "replicas_of_a_layer[2-combine]",
    "replicas_of_a_layer[4-swiglu]",
    *(f"repeated_experts[{prob_in}-{how}]" for prob_in, how in OVER_RANKS),
    "bad_input",
    "other_styles",
    "group_that_is_gone",
    *(f"compiled_layer[{how}]" for how in ("combine-None", "swiglu-None", "swiglu-dispatch", "combine-both")),
    "compiled_names_of_torchao",
]


class Ranks(NamedTuple):
    passed: list[list[str]]  # by rank
    errors: str


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return Ranks(*run_ranks(SCRIPT, RANKS, tmp_path_factory.mktemp("ranks")))


@pytest.mark.parametrize("check", CHECKS)
def test_over_gloo(ranks: Ranks, check: str) -> None:
    assert [check in passed for passed in ranks.passed] == [True] * RANKS, ranks.errors


def test_no_check_is_forgotten(ranks: Ranks) -> None:
    assert ranks.passed == [CHECKS] * RANKS, ranks.errors


def test_alone_nothing_needs_a_process_group() -> None:
    assert not torch.distributed.is_initialized()
    x = torch.randn(6, 64, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
    grad = torch.randn(6, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    mx = a2a_dispatch_mxfp8_fwd_hp_bwd(x, [6], [6])
    assert torch.equal(mx.q, MXTensor.quantize(x).q)
    assert torch.equal(torch.autograd.grad(mx, x, grad)[0], grad)
    back = a2a_combine_hp_fwd_mxfp8_bwd(x, [6], [6])
    (dx,) = torch.autograd.grad(back, x, grad)
    assert torch.equal(back, x)
    assert isinstance(dx, MXTensor)
    assert torch.equal(dx.q, MXTensor.quantize(grad).q)
    wide = a2a_combine_hp_fwd_mxfp8_bwd(x, [6], [6], mxfp8_bwd=False)
    assert torch.equal(torch.autograd.grad(wide, x, grad)[0], grad)
    both = to_mxfp8_a2a_dequant(x, [6], [6])
    assert torch.equal(both, MXTensor.quantize(x).dequantize())
    with pytest.raises(ValueError, match=r"output_splits: got \[5\]; allowed: 6 from rank 0"):
        a2a_dispatch_mxfp8_fwd_hp_bwd(x, [5], [6])
    with pytest.raises(ValueError, match=r"output_splits: got \[3, 3\]; allowed: 1 counts"):
        a2a_dispatch_mxfp8_fwd_hp_bwd(x, [3, 3], [3, 3])


@pytest.fixture
def mesh_of_one() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


class Experts(nn.Module):
    """A module of another package, which can fail; the hooks of ExpertParallel carry its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2, 64, 64))
        self.fails = False

    def forward(self, groups: Tensor, padded_counts: Tensor) -> Tensor:
        if self.fails:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return groups


def test_a_forward_that_fails_keeps_no_route(mesh_of_one: DeviceMesh) -> None:
    """A training that skips such a batch would keep the maps of every one."""
    experts = Experts()
    parallelize_module(experts, mesh_of_one, ExpertParallel("bf16", gradients="sum"))
    rows, counts = torch.randn(6, 64, generator=torch.Generator().manual_seed(0)).bfloat16(), torch.tensor([4, 2])
    for fails in (False, True, True, False):
        experts.fails = fails
        if fails:
            with pytest.raises(torch.OutOfMemoryError):
                experts(rows, counts)
        else:
            assert torch.equal(experts(rows, counts), rows)
        gc.collect()
        assert not any(isinstance(thing, Route) for thing in gc.get_objects())


def test_without_torch_the_import_says_what_to_install() -> None:
    code = "import sys; sys.modules['torch'] = None; import mxep.torch_frontend"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 1
    assert run.stderr.strip().endswith("PyTorch is missing; install it with `pip install 'mxep[torch]'`")
