"""One run at a time in a folder; a killed one leaves it free."""

import argparse
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from examples.training import train_all, train_torch
from examples.training.config import LOG_NAME
from examples.training.lock import LOCK_NAME, lock_folder, move_run

ROOT = Path(__file__).parents[3]


HOLD = """
import sys, time
from pathlib import Path
from examples.training.lock import lock_folder
file = lock_folder(Path(sys.argv[1]))
print("locked", flush=True)
time.sleep(1000)
"""


def test_a_killed_process_leaves_the_folder_free(tmp_path):
    out = tmp_path / "ü nicode ☃" / "run"
    process = subprocess.Popen([sys.executable, "-c", HOLD, out], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "locked\n"
        with pytest.raises(ValueError, match=re.escape(f"--out: {out} is in use by the run of process {process.pid};")):
            lock_folder(out)
    finally:
        process.kill()
        process.communicate()
    with lock_folder(out):
        assert (out / LOCK_NAME).read_text() == str(os.getpid())


@pytest.fixture
def running(tmp_path):
    """The folder of a run that goes on."""
    with lock_folder(tmp_path):
        (tmp_path / LOG_NAME).write_text("its log\n")
        yield tmp_path
        assert (tmp_path / LOG_NAME).read_text() == "its log\n"
        assert {path.name for path in tmp_path.iterdir()} == {LOG_NAME, LOCK_NAME}


@pytest.mark.slow  # test_training.py has one process that is refused
def test_a_second_run_says_so_in_every_process_and_leaves_the_first_one_alone(running):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "examples.training.train_torch")
    processes_of_jax = ("examples.training.train_jax", "--sharded-checkpoints", "--coordinator", coordinator)
    commands = [torchrun, *((*processes_of_jax, "--num-processes", "2", "--process-id", str(i)) for i in range(2))]
    flags = ("--preset", "tiny", "--ep", "2", "--data", argparse.__file__, "--device", "cpu", "--resume")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "XLA_FLAGS": ""}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", *command, *flags, "--out", running],
            cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True,
        )
        for command in commands
    ]  # fmt: skip
    errors = [process.communicate(timeout=150)[1] for process in processes]
    assert [process.returncode for process in processes] == [1, 1, 1], errors
    message = f"error: --out: {running} is in use by the run of process {os.getpid()}; allowed: another folder"
    assert [error.count(message) for error in errors] == [1, 1, 0], errors


def test_runs_that_start_over_leave_one_that_goes_on_alone(running):
    with pytest.raises(ValueError, match="is in use by the run of process"):
        move_run(running, running.with_name("elsewhere"))
    assert not running.with_name("elsewhere").exists()
    out = running.with_name(f"{running.name}-all")
    out.mkdir()
    (out / "torch-bf16").symlink_to(running)
    with pytest.raises(SystemExit, match=r"train_all: error: --out: .*torch-bf16 is in use by the run of process"):
        train_all.main(["--out", str(out), "--frameworks", "torch"])


def test_a_run_that_began_and_ended_since_the_flags_were_read_is_kept(tmp_path, monkeypatch):
    def found(device: str | None) -> str:
        (tmp_path / LOG_NAME).write_text("its log\n")
        return "cpu"

    monkeypatch.setattr(train_torch, "find_device", found)
    with pytest.raises(SystemExit, match="already holds a run; pass --resume to continue it"):
        train_torch.main(["--preset", "tiny", "--out", str(tmp_path)])
    assert (tmp_path / LOG_NAME).read_text() == "its log\n"
    lock_folder(tmp_path).close()


def test_a_run_that_starts_over_is_moved_but_for_its_lock(tmp_path):
    out, to = tmp_path / "torch-bf16", tmp_path / "torch-bf16.before"
    (out / "step-000005").mkdir(parents=True)
    (out / LOG_NAME).touch()
    move_run(out, to)
    assert [path.name for path in out.iterdir()] == [LOCK_NAME]
    assert sorted(path.name for path in to.iterdir()) == [LOG_NAME, "step-000005"]
