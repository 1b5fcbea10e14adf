"""The loops of examples/training: short, they learn, and a checkpoint is resumed with other ranks."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from examples.training import torch_fsdp_ep

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "examples" / "training"
SMALL = ("--layers", "1", "--experts", "4", "--length", "32", "--batch", "8", "--lr", "1e-2")
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | ENVIRONMENT
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=300
    )


def losses_of(ran: subprocess.CompletedProcess[str]) -> dict[int, float]:
    """The printed loss of each step."""
    assert ran.returncode == 0, ran.stderr
    return {
        int(step): float(loss) for step, loss in re.findall(r"^step (\d+): loss ([\d.]+)", ran.stdout, re.MULTILINE)
    }


def fsdp(out: Path, ranks: int, ep: int, *flags: str) -> subprocess.CompletedProcess[str]:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
    script = str(FOLDER / "torch_fsdp_ep.py")
    return run(*launcher, script, *SMALL, "--steps", "6", "--ep", str(ep), "--out", str(out), *flags)


def test_every_loop_is_short() -> None:
    loops = [FOLDER / name for name in ("torch_fsdp_ep.py", "jax_mesh.py")]
    assert max(len(path.read_text().splitlines()) for path in loops) <= 250


def test_fsdp_learns_and_resumes_with_other_ranks(tmp_path: Path) -> None:
    whole = losses_of(fsdp(tmp_path, 4, 2, "--checkpoint-every", "3"))
    assert list(whole) == [1, 2, 3, 4, 5, 6]
    # Measured: 2.03 less.
    assert whole[6] < whole[1] - 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3", "6"]
    shutil.rmtree(tmp_path / "6")
    resumed = losses_of(fsdp(tmp_path, 2, 1, "--resume"))
    assert list(resumed) == [4, 5, 6]
    # Measured: 4e-4. The first loss depends on the loaded weights, the next two on the loaded moments too.
    assert [resumed[step] for step in (4, 5, 6)] == pytest.approx([whole[step] for step in (4, 5, 6)], abs=4e-3)


def test_bad_flags_of_fsdp(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        torch_fsdp_ep.parse_args(["--out", str(tmp_path), "--ep", "2"], "cpu", 1)
    assert "--ep: 2 does not divide 1; 1 ranks, --ep 2" in capsys.readouterr().err
    message = "has no checkpoint; allowed: the --out of an earlier run"
    with pytest.raises(SystemExit, match=message):
        torch_fsdp_ep.latest(tmp_path)


def test_the_mesh_learns_the_same_on_any_mesh() -> None:
    script = str(FOLDER / "jax_mesh.py")
    one, four = (
        losses_of(run(script, *SMALL, "--steps", "4", "--cpu-devices", devices, "--expert", expert))
        for devices, expert in (("1", "1"), ("4", "2"))
    )
    assert list(one) == [1, 2, 3, 4]
    # Measured: 1.67 less.
    assert one[4] < one[1] - 1
    # Measured: 9e-4.
    assert list(four.values()) == pytest.approx(list(one.values()), abs=4e-3)
