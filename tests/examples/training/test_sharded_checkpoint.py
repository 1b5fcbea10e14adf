"""Sharded checkpoints are complete or skipped, at any file operation and with any changed byte."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from examples.training.sharded_checkpoint import SUMS, check_sums

from .faulty_saves import RUN
from .sharded_saves import checkpoints

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def saves(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    """The folder of `sharded_saves`, and what it tells."""
    out = tmp_path_factory.mktemp("saves")
    command = [sys.executable, "-m", "tests.examples.training.sharded_saves", str(out)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert not run.returncode, run.stderr[-8000:]
    return out, json.loads(run.stdout.splitlines()[-1])


def test_a_kill_at_any_file_operation_leaves_a_complete_checkpoint(saves):
    _, told = saves
    assert told["operations"][-1] == f"rename 10/{SUMS}.partial"
    assert set(told["steps"]) == {5}
    assert told["resumed"] == 10


def test_a_full_disk_names_the_file_and_leaves_the_checkpoint_before(saves):
    _, told = saves
    assert told["full"].startswith("checkpoint: ")
    assert "/run/15.orbax-checkpoint-tmp/" in told["full"]
    assert told["full"].endswith("then pass --resume, which continues from the last complete checkpoint")
    assert told["after"] == 10


def test_a_changed_byte_and_a_shorter_file_are_named(saves, capsys):
    """Orbax itself loads other weights after a changed byte in the arrays."""
    folder = saves[0] / "run"
    files = sorted(file for file in (folder / "10").rglob("*") if file.is_file())
    assert len(files) > 8
    for file in files:
        data, name = file.read_bytes(), str(file.relative_to(folder / "10"))
        for damaged in (data[:7] + bytes([data[7] ^ 1]) + data[8:], data[:-1], data[: len(data) // 2]):
            if damaged == data[:-1] and name == SUMS:
                continue  # the end of the last line
            file.write_bytes(damaged)
            with pytest.raises((ValueError, OSError), match=SUMS if name == SUMS else name):
                check_sums(folder / "10")
        file.write_bytes(data)
    check_sums(folder / "10")
    loaded = []
    for step in ("10", "5"):
        (folder / step / "run" / "metadata").write_bytes(b"{}")
        if step == "10":
            loaded.append(checkpoints(folder).load(folder, RUN))
    assert loaded[0].step == 5
    assert "10 is damaged and is skipped: run/metadata has SHA-256 " in capsys.readouterr().err
    damage = r"--resume: .*every checkpoint is damaged: 10: run/metadata has .*; 5: run/metadata has .*; restore one or"
    with pytest.raises(ValueError, match=damage):
        checkpoints(folder).load(folder, RUN)
