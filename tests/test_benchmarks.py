"""The GPU benchmark on a CPU, at small sizes: every case, check, peer and line of the ops and of the MoE layer.

The figures mean nothing. test_product_benchmarks.py does the same for the grouped products.
"""

import doctest
import itertools
import json
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import __main__, gpu, gpu_moe_layer, gpu_ops
from benchmarks.cases import cpu as cpu_cases
from benchmarks.cases import families, moe_layer, shapes
from benchmarks.figures import bars, device_timing, results, table_moe_layer, table_ops, timing
from benchmarks.peers import moe_layer as plain


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One sample of everything, and formulas as written: compiling them for a CPU takes minutes."""
    monkeypatch.setattr(torch, "compile", lambda f, **_: f)
    monkeypatch.setattr(device_timing, "batches", partial(device_timing.batches, samples=1))
    monkeypatch.setattr(device_timing, "BATCH_US", 1)
    monkeypatch.setattr(device_timing, "SETTLE_S", 0)
    monkeypatch.setattr(device_timing, "in_a_row", partial(device_timing.in_a_row, rounds=2, groups=1))
    monkeypatch.setattr(device_timing, "host", partial(device_timing.host, stretches=1, calls=1))
    plain._swiglu.cache_clear()
    yield
    plain._swiglu.cache_clear()


def measured(*only: str) -> list[Any]:
    return list(gpu.lines(only, shapes.TINY, "cpu", partial(timing.interleaved, rounds=1)))


def recorded(lines: list[Any], folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The lines as a later run of the document generator reads them."""
    monkeypatch.setattr(results, "RESULTS", folder)
    run = results.Run("1x GPU", "a" * 40)
    for line in lines:
        assert results.row(results.cells(line))
        results.record(run, line, folder / "h200.jsonl")
    rows = results.newest("h200")
    assert len(rows) == len(lines)
    return rows


def test_every_op_is_checked_compared_and_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours against the CPU's bytes, JAX against torch, formulas against ours; then the table from the stored lines."""
    lines = measured(*families.OPS, "host_overhead")
    assert {line.op for line in lines} == {*families.NAMES, "host_overhead"}
    for name in families.NAMES:
        found = {b.what for line in lines if line.op == name and (b := bars.bar(asdict(line)))}
        assert found == {"us" if name in bars.AT_MOST_US else "of a copy", "JAX / torch"}

    peers = [line for line in lines if "peer_values_that_differ" in line.error]
    assert {line.peer for line in peers} == {"torch_compile", "jax_jit"}
    same_arithmetic = ("quantize", "dequantize", "permute", "unpermute", "routing")
    differ = {(line.op, line.peer): line.error["peer_values_that_differ"] for line in peers}
    assert not {peer: n for peer, n in differ.items() if n and peer[0].startswith(same_arithmetic)}

    rows = recorded(lines, tmp_path, monkeypatch)
    shown = {(row["op"], table_ops.shape_of(row)) for row in rows if row["op"] != "host_overhead"}
    assert table_ops.table(rows).count("\n| `") == len(shown)


def test_the_layer_is_checked_compared_and_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_timing, "peak_nbytes", lambda run: 1000)  # None on a CPU
    lines = measured("moe_layer")
    assert all(line.peak_nbytes and line.peer_peak_nbytes for line in lines)
    uneven = [line for line in lines if "routing" in line.case]
    ((layer, routing),) = shapes.TINY.uneven
    assert {(line.case["tokens"], line.case["routing"]) for line in uneven} == {(layer.tokens, routing)}
    assert {line.op for line in uneven} == {"moe_layer_fwd_bwd"}
    found = [
        (line.op, line.frontend, line.case.get("weights"), line.case.get("clock"), line.peer)
        for line in lines
        if line not in uneven
    ]
    bwd, plain_torch, jax_peers = "moe_layer_fwd_bwd", "plain_torch_bf16", ("plain_torch_bf16", "torch_frontend")
    assert sorted(found, key=str) == sorted([
        *((op, "torch", held, None, plain_torch) for op in moe_layer.OPS for held in (None, "held")),
        *((op, "torch", None, "in a row", plain_torch) for op in moe_layer.OPS),
        (bwd, "torch", "held", "in a row", plain_torch),
        *((op, "jax", None, None, peer) for op in moe_layer.OPS for peer in (*jax_peers, "ragged_dot")),
        *((bwd, "jax", "held", None, peer) for peer in jax_peers),
    ], key=str)  # fmt: skip
    t, d, f, _, k = shapes.TINY.moe_layers[0]
    assert {line.flops for line in lines if line not in uneven} == {2 * 3 * t * k * d * f, 2 * 9 * t * k * d * f}
    assert all(line.error["grade"] == "sqnr_db" and line.error["sqnr_db"] >= 21 for line in lines)
    rows = recorded(lines, tmp_path, monkeypatch)
    assert table_moe_layer.table(rows).count("\n| forward") == 4 + 1
    assert table_moe_layer.table([row for row in rows if row["frontend"] == "jax"]).count("\n| forward") == 3 + 1
    assert table_moe_layer.table(rows).count("\n| forward and backward, one expert |") == 1


def test_a_layer_in_a_graph_has_lines_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU has no graphs: here a replay is the step itself."""
    monkeypatch.setattr(gpu_moe_layer, "captured", lambda step: (step, step(), 1000))
    inputs = moe_layer.layer_inputs(shapes.TINY.moe_layers[0], "cpu")
    reference = moe_layer.torch_programs(moe_layer.plain_torch_layer(inputs, torch.float32), inputs)
    each = partial(timing.interleaved, rounds=1)
    lines = list(gpu_moe_layer.graph_lines(inputs, reference["moe_layer_fwd_bwd"](), "cpu", each))
    for line in lines:
        assert (line.frontend, line.case["launch"], line.peer) == ("torch", "graph", "plain_torch_bf16")
        assert line.error["sqnr_db"] >= moe_layer.MIN_SQNR_DB
    assert [line.case.get("clock") for line in lines] == [None, "in a row"]
    single, in_a_row = lines
    assert (single.peak_nbytes, in_a_row.peer_peak_nbytes) == (1000, 1000)
    table = table_moe_layer.table(recorded(lines, tmp_path, monkeypatch))
    assert "| quantized in every step, in a CUDA graph |" in table
    assert f"({in_a_row.n}, {in_a_row.spread:.0%}) | {in_a_row.ratio:.2f}x |" in table
    assert f"({single.n}, {single.spread:.0%}) | {single.ratio:.2f}x |" in table


def test_the_table_of_the_layer() -> None:
    """Steps in a row of torch's own lines, or of older lines, where JAX's comparison has both times."""
    case = {"tokens": 8, "dim": 2, "hidden_dim": 4, "num_experts": 2, "top_k": 1, "recipe": "mxfp8"}
    line = {"op": "moe_layer_fwd_bwd", "case": case, "us": 9e4, "spread": 0.125, "n": 15, "hardware": "g",
            "commit": "c" * 40, "versions": {}, "error": {"sqnr_db": 22.7}, "peak_nbytes": 7 * 2**29}  # fmt: skip
    single, of_plain, of_torch = (
        line | {"frontend": frontend, "peer": peer, "peer_us": us, "ratio": us / 9e4}
        for frontend, peer, us in (("torch", "plain_torch_bf16", 18e4), ("jax", "plain_torch_bf16", 27e4),
                                   ("jax", "torch_frontend", 10e4))
    )  # fmt: skip
    older = table_moe_layer.table([single, of_plain | {"n": 2}, of_torch | {"n": 2}])
    assert "| 270.00 / 100.00 (2) | 2.70x | 180.00 / 90.00 (15, 12%) | 2.00x |" in older
    assert "| 22.7 | - / 3.5 |" in older
    own = single | {"case": {**case, "clock": "in a row"}, "n": 10, "us": 10e4, "peer_us": 26e4, "ratio": 2.6}
    rows = [row | {"peer_peak_nbytes": 3 * 2**30} for row in (single, of_plain, of_torch, own)]
    table = table_moe_layer.table(rows)
    assert "| 260.00 / 100.00 (10, 12%) | 2.60x | 180.00 / 90.00 (15, 12%) | 2.00x |" in table
    assert "| 22.7 | 3.0 / 3.5 |" in table


def test_steps_in_a_row_are_launched_ahead_and_sampled_there_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock ticks once for each step; the steps of "b" are three times as long."""
    monkeypatch.undo()  # of the fixture that takes one sample of everything
    monkeypatch.setattr(device_timing, "BATCH_US", 4e6)
    seen, now = [], [0.0]
    monkeypatch.setattr(device_timing.time, "perf_counter", lambda: now[0])

    def step(name: str, seconds: float) -> device_timing.Step:
        def wait() -> None:
            seen.append(f"{name} ends")
            now[0] += seconds

        return lambda: seen.append(name), lambda _: wait

    found = device_timing.in_a_row({"a": step("a", 2.0), "b": step("b", 6.0)})
    assert found == {"a": timing.Sample(2e6, 0.0, 10), "b": timing.Sample(6e6, 0.0, 10)}
    rounds = [name for before, name in itertools.pairwise(["", *seen]) if name in "ab" and before[:1] != name]
    assert rounds == ["a", "b", "a", "b", "a"]  # there, and back, twice
    one = seen[: seen.index("b")]
    assert one[:5] == ["a", "a ends", "a", "a", "a ends"]  # a compilation, then a step ahead
    assert one[-2:] == ["a ends", "a ends"]
    assert one.count("a") == one.count("a ends") == 1 + 1 + 1 + 5 * 2


def test_a_peer_that_fails_loses_its_line_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(*_: Any) -> Any:
        raise RuntimeError("RESOURCE_EXHAUSTED")

    monkeypatch.setattr(gpu_moe_layer, "jax_layer", out_of_memory)
    lines: list[Any] = []
    run = gpu.lines(["moe_layer_fwd"], shapes.TINY._replace(uneven=()), "cpu", partial(timing.interleaved, rounds=1))
    with pytest.raises(RuntimeError, match=r"^gpu: moe_layer_fwd in JAX: peer ragged_dot$"):
        lines.extend(run)
    assert {line.peer for line in lines if line.frontend == "jax"} == {"plain_torch_bf16", "torch_frontend"}


def test_operands_of_one_shape_differ() -> None:
    _, _, x, dy, _, weights = moe_layer.layer_inputs(shapes.TINY.moe_layers[0], "cpu")
    assert weights.w1.shape == weights.w3.shape
    for a, b in ((weights.w1, weights.w3), (weights.w1, weights.w2), (x, dy)):
        assert torch.ne(a.flatten(), b.flatten()).float().mean() > 0.9


def test_a_wrong_layer_is_an_error() -> None:
    """30% too much of one output leaves about 10 dB."""
    inputs = moe_layer.layer_inputs(shapes.TINY.moe_layers[0], "cpu")
    reference = moe_layer.torch_programs(moe_layer.plain_torch_layer(inputs, torch.float32), inputs)
    ours = moe_layer.torch_programs(moe_layer.our_torch_layer(inputs), inputs)
    (want, got) = (programs["moe_layer_fwd_bwd"]() for programs in (reference, ours))
    assert moe_layer.check(inputs, want, got)["sqnr_db"] > moe_layer.MIN_SQNR_DB
    for wrong, name in enumerate(moe_layer.OUTPUTS):
        outputs = tuple(out * 1.3 if i == wrong else out for i, out in enumerate(got))
        with pytest.raises(AssertionError, match=rf": {name}: \d+\.\d dB from bf16; expected 21.0 or more"):
            moe_layer.check(inputs, want, outputs)


@pytest.mark.parametrize("module", [bars, gpu, results, shapes])
def test_examples_in_docstrings(module: Any) -> None:
    found = doctest.testmod(module)
    assert found.attempted
    assert not found.failed


def test_names_of_ops_and_of_families() -> None:
    assert gpu.ops_named(["moe_layer", "combine"]) == ("combine", "moe_layer_fwd", "moe_layer_fwd_bwd")
    assert gpu.ops_named(["quantize"]) == families.OPS["quantize"]
    assert set(gpu.ops_named([])) == {name for names in gpu.FAMILIES.values() for name in names}
    with pytest.raises(ValueError, match=r"^gpu: ops: got nothing; allowed: combine, dequantize, "):
        gpu.ops_named(["nothing"])


def test_unknown_names_are_refused_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    layer = shapes.MoELayer(8, 32, 32, 2, 1)
    at_cpu = shapes.of_layer(layer, "cpu")
    cases = [*map(cpu_cases.matrix_cases, at_cpu.matrices), *map(cpu_cases.received_cases, at_cpu.received)]
    assert tuple(case.name for part in cases for case in part) == cpu_cases.NAMES
    assert __main__.unknown_names(["quantize_row", "train_step"], ["cpu", "train_step"]) == ""
    for arguments, words in (
        (["cpu", "--only", "quantize_row,nonsense"], "--only: got nonsense; allowed in cpu: dequantize, permute_mx, "),
        (["cpu", "--shape", "tokens=8"], "got 'tokens=8'; allowed: tokens=N,dim=N,hidden_dim=N,num_experts=N,top_k=N"),
        (["train_step", "--shape", LAYER], "--shape: got section train_step; allowed: cpu, gpu"),
        (["cpu", "--shape", LAYER.replace("32", "40")], "allowed: dim and hidden_dim in multiples of 32"),
        (["cpu", "--shape", LAYER.replace("top_k=1", "top_k=3")], "allowed: top_k of at most 2"),
    ):
        monkeypatch.setattr("sys.argv", ["benchmarks", *arguments])
        with pytest.raises(SystemExit):
            __main__.main()
        assert words in capsys.readouterr().err


LAYER = "tokens=8,dim=32,hidden_dim=32,num_experts=2,top_k=1"


def test_a_layer_of_the_users_own() -> None:
    own = shapes.of_layer(shapes.layer_named(LAYER), "gpu")
    names = "permute_mx", "unpermute", "routing", "swiglu_row_fwd", "combine"
    lines = list(gpu.lines(names, own, "cpu", partial(timing.interleaved, rounds=1)))
    assert {line.op for line in lines} == set(names)
    assert all(line.case.get("M", 8) == 8 for line in lines)


def test_a_wrong_byte_is_an_error_and_the_other_ops_are_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = gpu_ops.torch_call

    def wrong(op: str, *tensors: torch.Tensor, **options: Any) -> tuple[torch.Tensor, ...]:
        outputs = right(op, *tensors, **options)
        if op == "quantize_col" and len(tensors[0]) == 96:  # the whole, not the slice that the CPU recomputes
            outputs[0].view(-1)[-1] += 1
        return outputs

    monkeypatch.setattr(gpu_ops, "torch_call", wrong)
    with pytest.raises(RuntimeError, match=r"^gpu: quantize_col; quantize_col in JAX$"):
        measured("quantize_col", "quantize_row")
    errors = capsys.readouterr().err
    assert "output 0: 1 values differ from the CPU's at 64" in errors
    assert "output 0: 1 values differ from torch's, from JAX" in errors


def test_bars() -> None:
    bar = bars.bar
    line = {"op": "quantize_col", "frontend": "torch", "peer": "copy", "of_roof": 0.84, "us": 1.0, "peer_us": 1.0}
    assert str(bar(line)) == "of a copy 0.85: 0.84 MISSED"
    assert str(bar(line | {"of_roof": 0.85})) == "of a copy 0.85: 0.85 ok"
    assert bar(line | {"peer": "torch_compile"}) is None
    assert str(bar(line | {"op": "routing", "us": 99.0})) == "us 100: 99.00 ok"
    assert str(bar(line | {"op": "host_overhead", "us": 30.0})) == "us 30: 30.00 MISSED"
    jax = line | {"frontend": "jax", "peer": "torch_frontend", "us": 1.06}
    assert str(bar(jax)) == "JAX / torch 1.05: 1.06 MISSED"
    assert bar(jax | {"peer": "jax_jit"}) is None


def test_the_figures_of_an_op_have_one_commit_and_later_lines_replace_earlier_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    assert results.newest("h200") == []
    rows = [{"hardware": gpus, "commit": c, "op": op, "frontend": "torch", "case": {"M": 1}, "peer": "copy", "us": us}
            for gpus, c, op, us in [("1x", "a", "z", 0), ("1x", "a", "x", 1), ("1x", "b", "x", 2), ("1x", "b", "y", 3),
                                    ("1x", "b", "x", 4), ("4x", "c", "y", 5)]]  # fmt: skip
    (tmp_path / "h200.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [(row["op"], row["us"]) for row in results.newest("h200")] == [("z", 0), ("x", 4), ("y", 3), ("y", 5)]
