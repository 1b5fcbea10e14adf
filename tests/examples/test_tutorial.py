"""The tutorial: its output in docs/concepts/expert_parallel.md, and one rank by the library as two by hand."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from examples import expert_parallel_tutorial as tutorial

ROOT = Path(__file__).parents[2]
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


def start(*arguments: str) -> subprocess.Popen:
    command, env = [sys.executable, *arguments], os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_the_steps_of_two_ranks_are_the_layer_of_one() -> None:
    module = ("-m", "examples.expert_parallel_tutorial")
    runs = [start(*TORCHRUN, "2", *module), start(*module, "--style", "library")]
    (two, errors), (one, more) = (run.communicate(timeout=300) for run in runs)
    assert [run.returncode for run in runs] == [0, 0], errors + more
    page = (ROOT / "docs" / "concepts" / "expert_parallel.md").read_text()
    (table,) = re.findall(r"```\n(  rows of this rank.*?)```", page, re.DOTALL)
    assert two.startswith(table)
    assert two.endswith("dense weights are equal on 2 rank(s)\n")
    assert one.endswith("dense weights are equal on 1 rank(s)\n")
    losses = [[float(x) for x in re.findall(r"loss ([\d.]+)", text)] for text in (one, two)]
    assert len(losses[0]) == 5
    assert losses[0][-1] < losses[0][0] - 0.1
    # Measured: 1e-6, the last digit printed. Without the all-reduce of the router's gradient: 1e-3 and more.
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_bad_sizes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    for arguments, words in (
        ([], "got 8 experts and 512 tokens; allowed: multiples of 3, the ranks"),
        (["--tokens", "0"], "--tokens: got 0; allowed: at least 1"),
    ):
        with pytest.raises(SystemExit):
            tutorial.parse_args(arguments)
        assert words in capsys.readouterr().err
    assert tutorial.parse_args(["--device", "gpu", "--num-experts", "33", "--tokens", "300"]).dim == 7168
