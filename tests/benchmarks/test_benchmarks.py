"""The GPU benchmark on a CPU, at small sizes: every case, check, peer and line of the ops and of the MoE layer.

The figures mean nothing. test_product_benchmarks.py does the same for the grouped products.
"""

import doctest
import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import __main__, gpu, gpu_moe_layer, gpu_ops, layer_bytes
from benchmarks.cases import moe_layer, shapes
from benchmarks.cases.ops import families
from benchmarks.clocks import device_timing, energy, timing
from benchmarks.figures import results
from benchmarks.figures.tables import table_moe_layer, table_ops
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


def once(candidates: Mapping[str, Callable[[], object]]) -> dict[str, timing.Sample]:
    """In place of the GPU's clock."""
    for run in candidates.values():
        run()
    return dict.fromkeys(candidates, timing.Sample(10.0, 0.0, 1))


def measured(*only: str) -> list[Any]:
    return list(gpu.lines(only, shapes.TINY, "cpu", once))


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
    peers = [line for line in lines if "peer_values_that_differ" in line.error]
    assert {line.peer for line in peers} == {"torch_compile", "jax_jit", "separate_ops"}
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
    assert {(line.op, line.frontend) for line in lines} == {(op, of) for op in moe_layer.OPS for of in ("torch", "jax")}
    assert {line.peer for line in lines} == {"plain_torch_bf16", "recipe_bf16", "torch_frontend", "ragged_dot"}
    in_a_row = {(line.op, line.peer) for line in lines if line.case.get("clock") == "in a row"}
    assert in_a_row == {(op, peer) for op in moe_layer.OPS for peer in ("plain_torch_bf16", "recipe_bf16")}
    assert not any(line.joules or line.peer_joules for line in lines)  # no counter on a CPU
    assert all(line.error["grade"] == "sqnr_db" and line.error["sqnr_db"] >= 21 for line in lines)
    table = table_moe_layer.table(recorded(lines, tmp_path, monkeypatch))
    ours, against_recipe_bf16 = table.split("Recipe `bf16` is the same layer")
    assert ours.count("\n| forward") == 4 + 1
    assert ours.count("\n| forward and backward, one expert |") == 1
    peers = [line for line in lines if line.peer == "recipe_bf16"]
    assert against_recipe_bf16.count("\n| forward") == len(peers) > 0
    assert f"{peers[0].peer_us / 1e3:.2f} / {peers[0].us / 1e3:.2f} (" in against_recipe_bf16


def test_a_layer_in_a_graph_has_lines_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU has no graphs: here a replay is the step itself."""
    monkeypatch.setattr(gpu_moe_layer, "captured", lambda step: (step, step(), 1000))
    inputs = moe_layer.layer_inputs(shapes.TINY.moe_layers[0], "cpu")
    reference = moe_layer.torch_programs(moe_layer.plain_torch_layer(inputs, torch.float32), inputs)
    lines = list(gpu_moe_layer.graph_lines(inputs, reference["moe_layer_fwd_bwd"](), "cpu", once))
    for line in lines:
        assert (line.frontend, line.case["launch"]) == ("torch", "graph")
        assert line.error["sqnr_db"] >= moe_layer.MIN_SQNR_DB
    plain, recipe_bf16 = "plain_torch_bf16", "recipe_bf16"
    timed = [(line.case.get("clock"), line.peer) for line in lines]
    assert timed == [(None, plain), ("in a row", plain), ("in a row", recipe_bf16)]
    table = table_moe_layer.table(recorded(lines, tmp_path, monkeypatch))
    assert "| quantized in every step, in a CUDA graph |" in table


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


def test_energy_is_taken_between_advances_of_the_counter(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step takes 0.03 s; "a" 200 W, "b" 400 W. The counter advances every 0.1 s, by the energy until then."""
    monkeypatch.setattr(energy, "STRETCH_S", 3.0)
    now, spent, shown = [0.0], [0.0], [0.0, 0.0]
    monkeypatch.setattr(device_timing.time, "perf_counter", lambda: now[0])

    def step(watts: float) -> device_timing.Step:
        def wait() -> None:
            now[0] += 0.03
            spent[0] += 0.03 * watts

        return lambda: None, lambda _: wait

    def read() -> int:
        if now[0] - shown[0] >= 0.1:
            shown[:] = now[0], round(spent[0] * 1e3)
        return int(shown[1])

    found = energy.joules({"a": step(200), "b": step(400)}, read)
    assert found == pytest.approx({"a": 6.0, "b": 12.0}, rel=1e-3)
    assert energy.joules({"a": step(200)}, None) == {}
    with pytest.raises(RuntimeError, match="got a counter that stays at 7 mJ"):
        energy.joules({"a": step(200)}, lambda: 7)


def test_recipe_bf16_has_the_parameters_of_the_layer_and_no_quantization() -> None:
    inputs = moe_layer.layer_inputs(shapes.TINY.moe_layers[0], "cpu")
    plain_layer, bf16 = moe_layer.plain_torch_layer(inputs, torch.float32), moe_layer.recipe_bf16_layer(inputs)
    want, got = (moe_layer.torch_programs(of, inputs)["moe_layer_fwd_bwd"]() for of in (plain_layer, bf16))
    assert float(str(moe_layer.check(inputs, want, got)["sqnr_db"])) > 40  # MXFP8: 23


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


@pytest.mark.parametrize("module", [gpu, layer_bytes, results, shapes])
def test_examples_in_docstrings(module: Any) -> None:
    found = doctest.testmod(module)
    assert found.attempted
    assert not found.failed


def test_unknown_names_are_refused_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["benchmarks", "gpu", "--only", "quantize_row,nonsense"])
    with pytest.raises(SystemExit):
        __main__.main()
    assert "--only: got nonsense; allowed in gpu: combine" in capsys.readouterr().err


def test_a_layer_of_the_users_own() -> None:
    own = shapes.of_layer(shapes.layer_named("tokens=8,dim=32,hidden_dim=32,num_experts=2,top_k=1"))
    names = "permute_mx", "unpermute", "routing", "swiglu_row_fwd", "combine"
    lines = list(gpu.lines(names, own, "cpu", once))
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


def test_the_figures_of_a_model_have_one_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    rows = [{"hardware": "1x", "commit": c, "op": "x", "frontend": frontend, "case": {"model": model}, "peer": peer,
             "us": us} for us, (c, frontend, model, peer) in enumerate([
                 ("a", "torch", "m", "p"), ("a", "torch", "n", "p"), ("a", "jax", "m", "p"), ("b", "torch", "m", "q")
             ])]  # fmt: skip
    (tmp_path / "h200.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [row["us"] for row in results.newest("h200")] == [1, 2, 3]


def test_a_section_without_a_line_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A size of GPUs alone, on a CPU: the run ended with status 0."""
    monkeypatch.setattr(results, "gpu_name", lambda: None)
    out = tmp_path / "new" / "lines.jsonl"
    given = ["ep_jax", "--only", "7168/2048", "--commit", "0" * 40, "--out", str(out)]
    monkeypatch.setattr("sys.argv", ["benchmarks", *given])
    with pytest.raises(SystemExit):
        __main__.main()
    said = capsys.readouterr()
    assert "ep_jax: got --only 7168/2048, of which this machine measures nothing" in said.err
    assert "recorded" not in said.out
    assert out.parent.is_dir()
