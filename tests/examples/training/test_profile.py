"""Traces of a layer: files that Perfetto reads, with the ranges of docs/concepts/pipeline.md in order."""

import gzip
import json
from pathlib import Path

import jax
import pytest
import torch
from mxep import jax_frontend, torch_frontend

from examples import profile_layer

RANGES = ["mxep.route", "mxep.dispatch", "mxep.experts", "mxep.combine"]
SMALL = ["--tokens", "64", "--dim", "32", "--hidden-dim", "32"]


def test_a_trace_of_torch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile_layer.main(["--out", str(tmp_path), "--png", *SMALL])
    assert (tmp_path / "torch.png").read_bytes().startswith(b"\x89PNG")
    events = json.loads((tmp_path / "torch.json").read_text())["traceEvents"]
    ranges = [e for e in events if e["name"] in RANGES and e.get("ph") == "X"]
    ranges.sort(key=lambda event: event["ts"])
    assert [event["name"] for event in ranges] == RANGES * profile_layer.STEPS
    shown = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert shown[:2] == ["step", "step"]
    assert {*RANGES, "_SwiGLUFFNBackward"} <= set(shown)


def test_without_a_profiler_there_are_no_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise AssertionError(name)

    monkeypatch.setattr("mxep.torch_frontend.ops.ranges.record_function", fail)
    layer = torch_frontend.MoE(32, 32, 4, torch_frontend.RouterConfig(2))
    layer(torch.ones(4, 32))
    with torch.profiler.profile(), pytest.raises(AssertionError, match="mxep"):
        layer(torch.ones(4, 32))


def test_a_trace_of_jax(tmp_path: Path) -> None:
    profile_layer.main(["--framework", "jax", "--out", str(tmp_path), *SMALL])
    assert json.loads(gzip.decompress((tmp_path / "jax.json.gz").read_bytes()))["traceEvents"]
    assert [path.name for path in tmp_path.iterdir()] == ["jax.json.gz"]


def test_scopes_of_jax() -> None:
    config = jax_frontend.MoEConfig(dim=32, hidden_dim=32, num_experts=4, router=jax_frontend.RouterConfig(top_k=2))
    params = jax_frontend.moe.init(jax.random.key(0), config)
    program = jax.jit(lambda x: jax_frontend.moe.apply(params, x, config)[0]).lower(jax.numpy.ones((8, 32)))
    text = program.as_text(debug_info=True)
    assert not [name for name in RANGES if f"{name}/" not in text]


def test_sizes_that_the_layer_refuses(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="error: MoE: dim: got 40; allowed: positive"):
        profile_layer.main(["--out", str(tmp_path), "--dim", "40"])
    with pytest.raises(SystemExit, match=r"^2$"):
        profile_layer.main(["--out", str(tmp_path), "--png", "--framework", "jax"])
    with pytest.raises(SystemExit, match=r"^2$"):
        profile_layer.main(["--out", str(tmp_path), "--tokens", "0"])
