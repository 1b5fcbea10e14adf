"""Expert parallelism over gloo, on four processes; the checks are in ep_ranks.py."""

import gc
import subprocess
import sys
from collections.abc import Iterator

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

from ...ranks.fixture import Ranks, StartRanks
from . import ep_ranks

RANKS = 4


@pytest.fixture(scope="module")
def ranks(start_ranks: StartRanks) -> Ranks:
    return start_ranks(ep_ranks, RANKS)


@pytest.mark.parametrize(
    "check", [pytest.param(c, marks=[pytest.mark.slow] * (c in ep_ranks.SLOW)) for c in ep_ranks.checks(RANKS)]
)
def test_over_gloo(ranks: Ranks, check: str) -> None:
    ranks.run(check)


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
