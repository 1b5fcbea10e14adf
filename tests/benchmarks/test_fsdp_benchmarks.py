"""The benchmark of FSDP2's gathers on CPU ranks, at small sizes: check, lines, table, arguments. The times mean
nothing."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import __main__, readme
from benchmarks.figures import results
from benchmarks.figures.tables import table_fsdp
from benchmarks.models import fsdp_steps

from ..ranks.fixture import Ranks, StartRanks
from . import fsdp_ranks


@pytest.fixture(scope="module")
def two(start_ranks: StartRanks) -> Ranks:
    return start_ranks(fsdp_ranks, 2)


def as_on_a_gpu(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "us": 2000.0, "peer_us": 3000.0, "ratio": 1.5, "spread": 0.02, "nbytes": 33 << 28,
            "peer_nbytes": 64 << 28, "peak_nbytes": 5 << 30, "peer_peak_nbytes": 7 << 30}  # fmt: skip


def test_lines_and_table(two: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, others = two.run("all")
    assert others == []
    assert [(row["op"], row["case"]["model"], row["case"]["layers"], row["case"]["ranks"], row["case"]["mesh"],
             row["case"]["tokens"]) for row in rows] == [
        ("fsdp_gather_step", "mixtral-8x7b", 2, 2, "2 x 1", 64),
        ("fsdp_gather_step", "qwen3-30b-a3b", 2, 2, "2 x 1", 64),
    ]  # fmt: skip
    for row, layers in zip(rows, fsdp_steps.TINY.values(), strict=True):
        _, d, f, e, _ = layers.layer
        weights = 2 * layers.number * 3 * e * d * f  # of a forward and a backward
        assert (row["nbytes"], row["peer_nbytes"]) == (weights // 32 * 33, weights * 2)
        assert (row["peer"], row["n"], row["error"]["bytes_that_differ"]) == ("gathered_values", 1, 0)
        assert row["ratio"] == pytest.approx(row["peer_us"] / row["us"], abs=1e-3)
        assert row["peak_nbytes"] is row["peer_peak_nbytes"] is None
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    page = readme.ROOT / "docs" / "results" / "performance.md"
    assert readme.DOCUMENTS[page]() == ""
    for row in rows:
        line = results.Line(**as_on_a_gpu(row))
        results.record(results.Run("2x NVIDIA H200", "a" * 40), line, tmp_path / "h200_ep.jsonl")
    text = readme.DOCUMENTS[page]()
    assert text.startswith("## FSDP2: experts gathered as bytes\n\nNVIDIA H200, ")
    assert text.splitlines()[-2:] == [
        f"| {name}, 2 | 2, 2 x 1 | 64 | 3.0 / 2.0 (1, 2%) | 1.50x | 16.00 / 8.25 | 7.00 / 5.00 |"
        for name in fsdp_steps.NAMES
    ]


def test_lines_without_peaks_have_a_row() -> None:
    """A recorded line has no peer_peak_nbytes that is None."""
    row = {"us": 1e3, "spread": 0.0, "n": 10, "peer_us": 1e3, "ratio": 1.0, "nbytes": 1, "peer_nbytes": 2,
           "peak_nbytes": None, "hardware": "2x CPU", "versions": {}, "commit": "a" * 40,
           "case": {"model": "m", "layers": 1, "ranks": 2, "mesh": "2 x 1", "tokens": 64}}  # fmt: skip
    assert table_fsdp.table([json.loads(json.dumps(row))]).endswith("| 1.00x | 0.00 / 0.00 |  |")
    assert table_fsdp.table([]) == ""


@pytest.mark.parametrize("check", [name for name in fsdp_ranks.checks(2) if name != "all"])
def test_two_ranks(two: Ranks, check: str) -> None:
    two.run(check)


def test_four_ranks_have_two_meshes(start_ranks: StartRanks) -> None:
    rows, *_ = start_ranks(fsdp_ranks, 4).run("mixtral")
    assert [row["case"]["mesh"] for row in rows] == ["4 x 1", "2 x 2"]
    whole, half = (row["nbytes"] for row in rows)
    assert whole == 2 * half  # an expert rank has half of the experts


def test_meshes() -> None:
    assert [fsdp_steps.meshes(ranks) for ranks in (2, 4, 8)] == [((2, 1),), ((4, 1), (2, 2)), ((8, 1),)]
    with pytest.raises(ValueError, match=r"^fsdp: ranks: got 1; allowed: two or more"):
        fsdp_steps.meshes(1)


def test_no_routing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["benchmarks", "fsdp", "--routing", "balanced"])
    with pytest.raises(SystemExit):
        __main__.main()
    assert "--routing: got fsdp; allowed: ep, ep_jax, ep_alternating" in capsys.readouterr().err


def test_other_ranks_only_take_part(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[object] = []
    monkeypatch.setattr(fsdp_steps, "lines", lambda only: seen.append(only) or [])
    monkeypatch.setattr(__main__, "leave", lambda: seen.append("left"))
    monkeypatch.setattr("sys.argv", ["benchmarks", "fsdp", "--only", "mixtral-8x7b"])
    monkeypatch.setenv("RANK", "1")
    __main__.main()
    assert seen == [["mixtral-8x7b"], "left"]
    assert capsys.readouterr().out == ""
