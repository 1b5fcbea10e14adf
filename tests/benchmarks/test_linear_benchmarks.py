"""The benchmark of dense layers on a CPU, at small sizes: cases, checks, peers, lines. The figures mean nothing; a GPU
alone has graphs and compiles."""

import json
from dataclasses import asdict
from typing import Any

import pytest
import torch

from benchmarks import linear
from benchmarks.cases import linear as cases
from benchmarks.cases.linear import Size
from benchmarks.clocks import device_timing
from benchmarks.figures import bars, results
from benchmarks.figures.tables import table_linear
from benchmarks.peers import linear as peers

SMALL = Size(96, 64, (32,))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_timing, "SETTLE_S", 0)
    monkeypatch.setattr(device_timing, "BATCH_US", 1)


def measured(*only: str, **sizes: Any) -> list[Any]:
    return list(linear.lines(only, **({"large": (), "few_rows": (), "shared": (), "device": "cpu"} | sizes)))


def test_every_line_is_checked_compared_and_reported() -> None:
    lines = measured(large=(SMALL,), few_rows=(SMALL._replace(M=64),), shared=(Size(96, 64, (64, 32)),))
    found = {(line.op, line.frontend, line.case["M"], line.case["recipe"], line.peer) for line in lines}
    eager, shared = cases.OPS
    assert found == {
        *((eager, "torch", 96, "mxfp8", peer) for peer in (peers.BF16, peers.SCALED_MM)),
        *((eager, "torch", 96, recipe, peers.BF16) for recipe in linear.OTHER_RECIPES),
        *((eager, "jax", 96, "mxfp8", peer) for peer in (peers.JAX_BF16, "torch_frontend")),
        (eager, "torch", 64, "mxfp8", peers.BF16),
        (shared, "torch", 96, "mxfp8", peers.BF16),
    }
    for line in lines:
        assert line.error["sqnr_db"] > 25
        assert line.flops == 6 * line.case["M"] * 64 * (96 if line.op == shared else 32)
        json.loads(json.dumps(asdict(line)), parse_constant=pytest.fail)  # no NaN, no infinity
        assert results.row(results.cells(line))


def test_the_table_and_the_bars() -> None:
    """Of lines as a GPU gives them: 1.4 times as fast with 16384 rows, as fast from 4096, in a graph from 2048."""
    found = measured(large=(SMALL,), few_rows=(SMALL._replace(M=64),), shared=(Size(96, 64, (64, 32)),))
    run = asdict(results.Run("1x GPU", "a" * 40))
    rows = [{**run, **asdict(line)} for line in found]
    eager = next(row for row in rows if row["peer"] == peers.BF16 and row["case"]["recipe"] == "mxfp8")
    graph = {**eager, "case": {**eager["case"], "launch": "graph"}, "ratio": 1.234}
    text = table_linear.table([*rows, graph])
    assert text.count("\n| one layer") == 2 + len(linear.OTHER_RECIPES)
    assert text.count("\n| layers that read the same x | 96, 64, 64+32 |") == 1
    assert "| 1.23x |" in text
    assert table_linear.table([]) == ""
    for m, launch, ratio, said in (
        (16384, None, 1.39, "x 1.4: 1.39 MISSED"), (4096, None, 1.0, "x 1: 1.00 ok"), (2048, None, 0.9, "None"),
        (2048, "graph", 0.99, "x 1: 0.99 MISSED"),
    ):  # fmt: skip
        case = {**eager["case"], "M": m} | ({"launch": launch} if launch else {})
        assert str(bars.bar({**eager, "case": case, "ratio": ratio})) == said


def test_the_measured_sizes() -> None:
    assert [(s.M, s.K, s.N) for s in cases.LARGE] == [
        (16384, 4096, (4096,)), (16384, 7168, (7168,)), (16384, 4096, (14336,)), (16384, 7168, (18432,))
    ]  # fmt: skip
    assert {s.M for s in cases.FEW_ROWS} == {2048, 4096}


def test_a_wrong_result_is_not_timed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(peers, "scaled_mm", lambda compiled: lambda x, w: peers.linear_bf16(x, w) * 2)
    with pytest.raises(RuntimeError, match=r"linear: linear \(96, 64, \(32,\)\): torch_scaled_mm_rowwise"):
        measured(cases.OPS[0], large=(SMALL,))
    assert "dB from bf16; expected 25.2 or more" in capsys.readouterr().err


def test_an_unknown_name() -> None:
    with pytest.raises(ValueError, match="linear: ops: got gemm; allowed: linear_fwd_bwd"):
        measured("gemm")


def test_layers_that_share_their_rows() -> None:
    o = cases.operands(Size(96, 64, (64, 32)), "cpu")
    ours, plain = (cases.shared_step(o, recipe)() for recipe in ("mxfp8", None))
    assert [out.shape for out in ours] == [out.shape for out in plain]
    assert cases.check(ours, plain)["sqnr_db"] > 25
    assert torch.equal(ours[0], cases.shared_step(o, "mxfp8")()[0])
