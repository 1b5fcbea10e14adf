"""A rehearsal of the GPU's benchmark on the CPU: every check, peer and line of it at a small size; no figures."""

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[1]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks import device_timing, gpu

    # The formulas as they stand: compiling them for a CPU takes minutes and is not what runs on a GPU.
    monkeypatch.setattr(torch, "compile", lambda f, **_: f)
    monkeypatch.setattr(device_timing, "batches", partial(device_timing.batches, samples=1))
    monkeypatch.setattr(device_timing, "BATCH_US", 1)
    monkeypatch.setattr(device_timing, "host", partial(device_timing.host, stretches=1, calls=1))
    return gpu


def rehearsed(gpu: Any, *only: str) -> list[Any]:
    """The products have a rehearsal of their own: test_product_benchmarks.py."""
    from benchmarks import gpu_cases, shapes, timing

    named = only or (*(name for family in gpu_cases.FAMILIES for name in family), "host_overhead")
    each = partial(timing.interleaved, rounds=1)
    return list(gpu.lines(named, shapes.TINY_LAYER, shapes.TINY_PRODUCTS, "cpu", each))


def test_every_op_is_checked_compared_and_reported(gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the CPU's bytes, JAX's against torch's, every formula against ours; from a line to the README."""
    from benchmarks import bars, gpu_cases, readme_gpu, results

    lines = rehearsed(gpu)
    names = {name for family in gpu_cases.FAMILIES for name in family}
    assert {line.op for line in lines} == names | {"host_overhead"}
    for name in names:
        held_to = {b.what for line in lines if line.op == name and (b := bars.bar(asdict(line)))}
        assert held_to == {"us" if name == "routing" else "of a copy", "JAX / torch"}

    peers = [line for line in lines if "peer_values_that_differ" in line.error]
    assert {line.peer for line in peers} == {"torch_compile", "jax_jit"}
    same_arithmetic = ("quantize", "dequantize", "permute", "unpermute", "routing")
    differ = {(line.op, line.peer): line.error["peer_values_that_differ"] for line in peers}
    assert not {peer: n for peer, n in differ.items() if n and peer[0].startswith(same_arithmetic)}

    monkeypatch.setattr(results, "RESULTS", tmp_path)
    run = results.Run("1x GPU", "a" * 40)
    for line in lines:
        assert results.row(results.cells(line))
        results.record(run, line, tmp_path / "h200.jsonl")
    rows = results.newest("h200")
    assert len(rows) == len(lines)
    assert readme_gpu.gpu(rows).count("\n| `") == len({(r["op"], readme_gpu._shape(r)) for r in rows}) - len(
        [r for r in rows if r["op"] == "host_overhead"]
    )


def test_a_wrong_byte_is_an_error_and_the_other_ops_are_measured(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = gpu.torch_call

    def wrong(op: str, *tensors: torch.Tensor, **options: Any) -> tuple[torch.Tensor, ...]:
        outputs = right(op, *tensors, **options)
        if op == "quantize_col" and len(tensors[0]) == 96:  # the whole, not the slice that the check computes
            outputs[0].view(-1)[-1] += 1
        return outputs

    monkeypatch.setattr(gpu, "torch_call", wrong)
    with pytest.raises(RuntimeError, match=r"^gpu: quantize_col; quantize_col in JAX$"):
        rehearsed(gpu, "quantize_col", "quantize_row")
    errors = capsys.readouterr().err
    assert "output 0: 1 values differ from the CPU's at 64" in errors
    assert "output 0: 1 values differ from torch's, from JAX" in errors


def test_bars(gpu: Any) -> None:
    from benchmarks.bars import bar

    line = {"op": "quantize_col", "frontend": "torch", "peer": "copy", "of_roof": 0.84, "us": 1.0, "peer_us": 1.0}
    assert str(bar(line)) == "of a copy 0.85: 0.84 MISSED"
    assert str(bar(line | {"of_roof": 0.85})) == "of a copy 0.85: 0.85 ok"
    assert bar(line | {"peer": "torch_compile"}) is None
    assert str(bar(line | {"op": "routing", "us": 99.0})) == "us 100: 99.00 ok"
    assert str(bar(line | {"op": "host_overhead", "us": 30.0})) == "us 30: 30.00 MISSED"
    jax = line | {"frontend": "jax", "peer": "torch_frontend", "us": 1.06}
    assert str(bar(jax)) == "JAX / torch 1.05: 1.06 MISSED"
    assert bar(jax | {"peer": "jax_jit"}) is None


def test_figures_of_an_op_are_of_one_commit_and_the_later_of_two(
    gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks import results

    monkeypatch.setattr(results, "RESULTS", tmp_path)
    assert results.newest("h200") == []
    rows = [{"commit": c, "op": op, "frontend": "torch", "case": {"M": 1}, "peer": "copy", "us": us}
            for c, op, us in [("a", "z", 0), ("a", "x", 1), ("b", "x", 2), ("b", "y", 3), ("b", "x", 4)]]  # fmt: skip
    (tmp_path / "h200.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [(row["op"], row["us"]) for row in results.newest("h200")] == [("z", 0), ("x", 4), ("y", 3)]
