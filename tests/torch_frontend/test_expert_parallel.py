"""Expert parallelism over gloo, four processes at once; the checks themselves are in ep_ranks.py."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from mxep.torch_frontend import (
    MXTensor,
    a2a_combine_hp_fwd_mxfp8_bwd,
    a2a_dispatch_mxfp8_fwd_hp_bwd,
    to_mxfp8_a2a_dequant,
)

RANKS = 4
SCRIPT = Path(__file__).with_name("ep_ranks.py")
DEGREES = [f"equal_to_dense[{ep}-{r}]" for ep in (1, 2, 4) for r in ("bf16", "mxfp8", "mxfp8_wgrad_with_hp")]
CHECKS = [
    *DEGREES,
    "reload_between_degrees",
    "tutorial_flow",
    "empty_rank_and_hot_expert",
    "wire_of_a2a_dequant",
    "dispatch_is_one_collective",
    "several_layers_and_recomputation",
    "bad_input",
    "compiled_layer",
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    out = tmp_path_factory.mktemp("ranks")
    commands = [
        [sys.executable, str(SCRIPT), str(rank), str(RANKS), str(out / "store"), str(out)] for rank in range(RANKS)
    ]
    ranks = [subprocess.Popen(c, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) for c in commands]
    try:
        errors = [rank.communicate(timeout=300)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * RANKS, "\n".join(errors)
    return [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.mark.parametrize("check", CHECKS)
def test_over_gloo(results: list[dict[str, str]], check: str) -> None:
    assert [result[check] for result in results] == [""] * RANKS


def test_all_checks_are_collected(results: list[dict[str, str]]) -> None:
    assert set(results[0]) == set(CHECKS)


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
    with pytest.raises(ValueError, match=r"output_splits: got \[5\]; allowed: \[6\]"):
        a2a_dispatch_mxfp8_fwd_hp_bwd(x, [5], [6])
    with pytest.raises(ValueError, match=r"output_splits: got \[3, 3\]; allowed: 1 counts"):
        a2a_dispatch_mxfp8_fwd_hp_bwd(x, [3, 3], [3, 3])


def test_without_torch_the_import_says_what_to_install() -> None:
    code = "import sys; sys.modules['torch'] = None; import mxep.torch_frontend"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 1
    assert run.stderr.strip().endswith("PyTorch is missing; install it with `pip install 'mxep[torch]'`")
