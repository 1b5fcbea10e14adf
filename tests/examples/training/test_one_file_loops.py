"""The loops of examples/training: short, they learn, and a checkpoint is resumed with other ranks."""

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from examples.training import jax_mesh, torch_fsdp_ep

from ...ranks.fixture import StartRanks
from .. import launched

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "examples" / "training"
SMALL = ("--layers", "1", "--experts", "4", "--length", "32", "--batch", "8", "--lr", "1e-2")


def losses_of(printed: str) -> dict[int, float]:
    """The printed loss of each step."""
    found = re.findall(r"^step (\d+): loss ([\d.]+)", printed, re.MULTILINE)
    return {int(step): float(loss) for step, loss in found}


@pytest.fixture
def fsdp(start_ranks: StartRanks, tmp_path: Path) -> Callable[..., dict[int, float]]:
    """The losses of a run on `ranks` ranks, with checkpoints in tmp_path."""

    def train(ranks: int, ep: int, *flags: str) -> dict[int, float]:
        arguments = [*SMALL, "--steps", "6", "--ep", str(ep), "--out", str(tmp_path), *flags]
        return losses_of(launched.launch(start_ranks(launched, ranks, backend=None), torch_fsdp_ep.__name__, arguments))

    return train


def test_every_loop_is_short() -> None:
    loops = [FOLDER / name for name in ("torch_fsdp_ep.py", "jax_mesh.py")]
    assert max(len(path.read_text().splitlines()) for path in loops) <= 250


def test_fsdp_learns_and_resumes_with_other_ranks(tmp_path: Path, fsdp: Callable[..., dict[int, float]]) -> None:
    whole = fsdp(4, 2, "--checkpoint-every", "3")
    assert list(whole) == [1, 2, 3, 4, 5, 6]
    # Measured: 2.03 less.
    assert whole[6] < whole[1] - 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3", "6"]
    shutil.rmtree(tmp_path / "6")
    resumed = fsdp(2, 1, "--resume")
    assert list(resumed) == [4, 5, 6]
    # Measured: 4e-4. The first loss depends on the loaded weights, the next two on the loaded moments too.
    assert [resumed[step] for step in (4, 5, 6)] == pytest.approx([whole[step] for step in (4, 5, 6)], abs=4e-3)


def test_bad_flags_of_fsdp(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "used" / "4").mkdir(parents=True)
    used, new = str(tmp_path / "used"), str(tmp_path / "new")
    for message, *flags in (
        ("--ep: 2 does not divide 1; 1 ranks, --ep 2", new, "--ep", "2"),
        (f"--resume: {new} has no checkpoint; allowed: the --out of an earlier run", new, "--resume"),
        (f"--out: {used} already holds a run; pass --resume to continue it, or another folder", used),
        ("--steps: got 4; allowed: more than 4, the step of the last ch", used, "--resume", "--steps", "4"),
        ("--checkpoint-every: got -1; allowed: at least 0", new, "--checkpoint-every", "-1"),
    ):
        with pytest.raises(SystemExit, match="2"):
            torch_fsdp_ep.parse_args(["--out", *flags], "cpu", 1)
        assert message in capsys.readouterr().err
    assert torch_fsdp_ep.parse_args(["--out", used, "--resume"], "cpu", 1).start == 4


@pytest.mark.parametrize("loop", [torch_fsdp_ep, jax_mesh])
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--data", "short.txt"], "--data: got short.txt; allowed: a file of more than --length 64 bytes"),
        (["--data", "missing"], "--data: got missing; allowed: a file"),
        (["--steps", "0"], "--steps: got 0; allowed: at least 1"),
        (["--heads", "0"], "--heads: got 0; allowed: at least 1"),
        (["--heads", "3"], "--heads: got 3; allowed: divisors of --dim 64"),
        (["--dim", "48"], "--dim: got 48; allowed: multiples of 32"),
        (["--hidden-dim", "48"], "--hidden-dim: got 48; allowed: multiples of 32"),
        (["--top-k", "9"], "--top-k: got 9; allowed: 1 to 8 experts"),
    ],
)
def test_bad_flags_of_both(
    loop: Any,
    flags: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("short.txt").write_text("a" * 64)
    with pytest.raises(SystemExit, match="2"):
        loop.parse_args(["--out", "new", *flags], "cpu", 1) if loop is torch_fsdp_ep else loop.parse_args(flags)
    assert message in capsys.readouterr().err


def test_one_step_without_checkpoints(
    tmp_path: Path, fsdp: Callable[..., dict[int, float]], capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text"
    text.write_text("a" * 33)  # one window
    assert list(fsdp(1, 1, "--steps", "1", "--checkpoint-every", "0", "--data", str(text))) == [1]
    assert list(tmp_path.iterdir()) == [text]
    jax_mesh.train(jax_mesh.parse_args([*SMALL, "--steps", "1", "--data", str(text)]))
    assert list(losses_of(capsys.readouterr().out)) == [1]


def test_the_mesh_learns_the_same_on_any_mesh(capsys: pytest.CaptureFixture[str]) -> None:
    """On one device in a process of its own, and on the four of this one."""
    flags = [*SMALL, "--steps", "4"]
    command = [sys.executable, str(FOLDER / "jax_mesh.py"), *flags, "--cpu-devices", "1"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert ran.returncode == 0, ran.stderr
    jax_mesh.train(jax_mesh.parse_args([*flags, "--expert", "2"]))
    one, four = losses_of(ran.stdout), losses_of(capsys.readouterr().out)
    assert list(one) == [1, 2, 3, 4]
    # Measured: 1.67 less.
    assert one[4] < one[1] - 1
    # Measured: 9e-4.
    assert list(four.values()) == pytest.approx(list(one.values()), abs=4e-3)
