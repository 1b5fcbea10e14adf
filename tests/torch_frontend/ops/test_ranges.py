"""Ranges of docs/guides/metrics.md in a trace, and none without a profiler."""

import pytest
import torch
from mxep.torch_frontend import MoE, RouterConfig
from torch.profiler import profile

RANGES = ["mxep.route", "mxep.dispatch", "mxep.experts", "mxep.combine"]


def test_the_ranges_of_a_trace() -> None:
    layer = MoE(32, 32, 4, RouterConfig(2))
    with profile() as trace:
        layer(torch.ones(4, 32))[0].sum().backward()
    events = sorted(trace.events(), key=lambda event: event.time_range.start)
    assert [event.name for event in events if event.name in RANGES] == RANGES
    assert "_SwiGLUFFNBackward" in {event.name for event in events}  # as the page says


def test_without_a_profiler_there_are_no_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise AssertionError(name)

    monkeypatch.setattr("mxep.torch_frontend.ops.ranges.record_function", fail)
    layer = MoE(32, 32, 4, RouterConfig(2))
    layer(torch.ones(4, 32))
    with profile(), pytest.raises(AssertionError, match="mxep"):
        layer(torch.ones(4, 32))
