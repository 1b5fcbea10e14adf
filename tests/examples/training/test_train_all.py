"""Which runs `examples.training.train_all` starts, with which flags, and its report of a run that fails."""

import sys
from pathlib import Path

import pytest

from examples.training import plot_curves, train_all
from examples.training.config import PRESETS, describe
from examples.training.runlog import RunLog


@pytest.fixture
def commands(monkeypatch):
    """The commands of the runs, which write a log and succeed, and "plot" for the plot."""
    found = []

    def run(command, env, capture):
        assert not capture  # what a run prints is seen while it trains
        found.append(command)
        flag = {command[i]: command[i + 1] for i in range(1, len(command) - 1) if command[i].startswith("--")}
        if flag["--recipe"] == "fp8_rowwise":
            return 1, ""
        header = describe(PRESETS["tiny"], device="NVIDIA H200", ep=int(flag["--ep"]))
        log = RunLog(Path(flag["--out"]), PRESETS["tiny"], 0, header, write=True)
        for step in range(3):
            log.step()
            log.train(step, {"loss": 5.5}, peak_nbytes=2**30)
        log.close()
        return 0, ""

    monkeypatch.setattr(train_all, "run", run)
    monkeypatch.setattr(plot_curves, "main", lambda argv: found.append("plot"))
    return found


def test_four_runs_then_the_plot(commands, tmp_path, capsys):
    train_all.main(["--out", str(tmp_path), "--preset", "tiny"])
    assert [Path(c[c.index("--out") + 1]).name for c in commands[:-1]] == [
        "torch-bf16",
        "torch-mxfp8_wgrad_with_hp",
        "jax-bf16",
        "jax-mxfp8_wgrad_with_hp",
    ]
    assert commands[-1] == "plot"
    assert commands[0] == [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m",
        "examples.training.train_torch", "--ep", "2", "--recipe", "bf16", "--out", str(tmp_path / "torch-bf16"),
        "--preset", "tiny",
    ]  # fmt: skip
    assert commands[2][:3] == [sys.executable, "-m", "examples.training.train_jax"]
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert all("of the bf16 peak), at most 1.0 GiB" in line for line in lines)


def test_other_runs_go_on_when_one_fails(commands, tmp_path):
    flags = ["--out", str(tmp_path), "--frameworks", "torch", "--recipes", "fp8_rowwise", "bf16", "--ep", "1"]
    with pytest.raises(SystemExit, match="train_all: error: failed: torch-fp8_rowwise"):
        train_all.main(flags)
    assert len(commands) == 2


@pytest.mark.parametrize(
    ("framework", "flags", "message"),
    [
        ("torch", ["--checkpoint-evry", "2"], "unrecognized arguments: --checkpoint-evry 2"),
        ("jax", ["--checkpoint-evry", "2"], "unrecognized arguments: --checkpoint-evry 2"),
        ("jax", ["--accumulate", "0"], "--accumulate: got 0; allowed: divisors of"),
        ("jax", ["--process-id", "1"], "--process-id: got 1; allowed: 0 to 0"),
        ("torch", ["--data", "missing"], "--data: got 'missing', which does not exist"),
        ("torch", ["--init-from", "missing"], "--init-from: got 'missing'; allowed: a checkpoint folder"),
        ("torch", ["--limit", "8"], "--limit: got 8.0; allowed: a share between 0 and 1"),
    ],
)
def test_a_bad_flag_costs_nothing(commands, tmp_path, capsys, framework, flags, message):
    """Runs that exist are kept, and nothing trains."""
    given = ["--out", str(tmp_path), "--frameworks", framework, "--recipes", "bf16", "--preset", "tiny"]
    train_all.main(given)
    with pytest.raises(SystemExit) as exit:
        train_all.main([*given, *flags])
    assert message in capsys.readouterr().err + str(exit.value)
    assert len(commands) == 1
    assert (tmp_path / f"{framework}-bf16" / "log.jsonl").exists()


def test_a_run_that_does_not_begin_leaves_the_one_before(commands, tmp_path, monkeypatch):
    """Without the GPU that a flag asks for, for example; a run that begins takes its place."""
    out, given = tmp_path / "torch-bf16", ["--out", str(tmp_path), "--frameworks", "torch", "--recipes", "bf16"]
    train_all.main(given)
    (out / "step-000002").mkdir()
    began = train_all.run
    monkeypatch.setattr(train_all, "run", lambda command, env, capture: (1, ""))
    with pytest.raises(SystemExit, match="failed: torch-bf16"):
        train_all.main(given)
    assert {path.name for path in out.iterdir()} == {"log.jsonl", "step-000002", "lock"}
    monkeypatch.setattr(train_all, "run", began)
    train_all.main(given)
    assert {path.name for path in out.iterdir()} == {"log.jsonl", "lock"}
    assert [path.name for path in tmp_path.iterdir()] == ["torch-bf16"]


def test_one_framework_is_not_compared(commands, tmp_path, capsys):
    train_all.main(["--out", str(tmp_path), "--frameworks", "jax"])
    assert "plot" not in commands
    assert "no curves: the comparison needs torch and jax, and bf16" in capsys.readouterr().out
