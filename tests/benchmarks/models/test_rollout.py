"""The benchmark of a generator's experts on a CPU: bytes are compared before any time. The figures mean nothing."""

from functools import partial

import pytest
import torch
from mxep.torch_frontend import grouped_swiglu_ffn

from benchmarks.cases.shapes import TINY
from benchmarks.clocks import device_timing
from benchmarks.models import rollout


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiled peer takes longer than the rest."""
    monkeypatch.setattr(device_timing, "BATCH_US", 1)
    monkeypatch.setattr(device_timing, "SETTLE_S", 0)
    monkeypatch.setattr(torch, "compile", lambda f: f)
    monkeypatch.setattr(rollout, "TOKENS", (1, 32))


def test_a_line_per_number_of_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    rollout.measure(TINY.moe_layers[0], "cpu")
    one, more = capsys.readouterr().out.splitlines()
    assert "  1 tokens, eager: " in one
    assert " 32 tokens, eager: " in more
    assert more.endswith(" dB")


def test_other_bytes_than_of_training_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def changed(*args: object, **kwargs: object) -> torch.Tensor:
        y = grouped_swiglu_ffn(*args, **kwargs)  # type: ignore[arg-type]
        return y if torch.is_grad_enabled() else y * 1.01

    monkeypatch.setattr(rollout, "grouped_swiglu_ffn", changed)
    with pytest.raises(AssertionError, match=r"1 tokens: got other bytes than the training forward"):
        rollout.measure(TINY.moe_layers[0], "cpu")


def test_the_floor_counts_experts_with_rows() -> None:
    shape = TINY.moe_layers[0]
    floor = partial(rollout.floor_us, shape)
    assert floor(torch.tensor([1, 1, 2, 2])) == 2 * floor(torch.tensor([0, 3, 3, 3])) > 0
