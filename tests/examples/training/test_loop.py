"""--resume and the times of checkpoints, with a fake trainer that records its first step."""

import argparse
import errno
import os
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from examples.training.checkpoint import Checkpoint, step_folders
from examples.training.config import LOG_NAME, PRESETS
from examples.training.data import Text
from examples.training.loop import train
from examples.training.runlog import read_log

CONFIG = replace(PRESETS["tiny"], steps=4, eval_every=2)


class FakeTrainer:
    """A trainer whose weights never change."""

    is_writer = True
    first_steps: ClassVar[list[int]] = []

    device_name = "cpu"

    def __init__(self, config, recipe: str, ep: int, start: Checkpoint, device: str) -> None:
        self.first_steps.append(start.step)
        self.start = start

    def step(self, step: int, batch: np.ndarray) -> dict[str, float]:
        return {"loss": 5.5, "aux_loss": 1.0, "grad_norm": 1.0}

    def peak_nbytes(self) -> int:
        return 0

    def evaluate(self, text: Text) -> float:
        return 5.5

    def state(self, step: int) -> Checkpoint:
        return replace(self.start, step=step)


def run(out: Path, resume: bool, **changes: int) -> int:
    """Train in `out`. Returns the first step."""
    flags = {"init_from": None, "recipe": "bf16", "ep": 1, "device": "cpu"}
    args = Namespace(data=Path(argparse.__file__), out=out, resume=resume, **flags)
    train("fake", args, replace(CONFIG, **changes), FakeTrainer)
    return FakeTrainer.first_steps[-1]


def test_resume_continues_from_the_last_checkpoint(tmp_path, capsys):
    assert run(tmp_path, resume=False) == 0
    assert run(tmp_path, resume=True) == CONFIG.steps
    assert "starting at step 0" not in capsys.readouterr().err


def test_resume_without_a_checkpoint_prints_a_notice(tmp_path, capsys):
    assert run(tmp_path, resume=True) == 0
    assert f"fake: no checkpoint in {tmp_path}, starting at step 0" in capsys.readouterr().err


def test_resume_from_damaged_checkpoints_fails_and_keeps_the_log(tmp_path):
    run(tmp_path, resume=False)
    for folder in tmp_path.glob("step-*"):
        (folder / "meta.json").write_text("{}")
    log = (tmp_path / LOG_NAME).read_bytes()
    with pytest.raises(SystemExit, match=r"fake: error: --resume: .*every checkpoint is damaged: step-000004: m"):
        run(tmp_path, resume=True)
    assert (tmp_path / LOG_NAME).read_bytes() == log


def test_a_full_disk_ends_the_run_and_resume_continues(tmp_path, monkeypatch):
    run(tmp_path, resume=False, steps=2, schedule_steps=4)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", no_space)
        with pytest.raises(SystemExit, match=r"fake: error: .*checkpoint: No space left .* pass --resume, .*weights"):
            run(tmp_path, resume=True)
    assert [folder.name for folder in step_folders(tmp_path)] == ["step-000002"]
    assert run(tmp_path, resume=True) == 2


def no_space(descriptor: int) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("every", "steps"), [({}, [2, 4]), ({"checkpoint_every": 3}, [3, 4]), ({"checkpoint_every": 0}, [])]
)
def test_checkpoints_come_with_evaluations_or_by_their_own_count(tmp_path, every, steps):
    run(tmp_path, resume=False, **every)
    assert [int(folder.name.removeprefix("step-")) for folder in step_folders(tmp_path)] == steps
    assert [r["step"] for r in read_log(tmp_path) if r["kind"] == "eval"] == [0, 2, 4]


def test_a_finished_run_is_lengthened(tmp_path):
    run(tmp_path, resume=False)
    assert run(tmp_path, resume=True, steps=6, schedule_steps=4) == 4
    assert [r["step"] for r in read_log(tmp_path) if r["kind"] == "train"] == list(range(6))


def test_a_longer_run_has_the_schedule_of_its_checkpoint(tmp_path):
    run(tmp_path, resume=False)
    with pytest.raises(SystemExit, match="another run: schedule_steps is 4 there and 6 here"):
        run(tmp_path, resume=True, steps=6)


def test_a_run_is_not_shortened(tmp_path):
    run(tmp_path, resume=False)
    with pytest.raises(
        SystemExit, match=r"--steps: got 3 with --resume; allowed: at least 4, the step of .*step-000004"
    ):
        run(tmp_path, resume=True, steps=3, schedule_steps=4)
