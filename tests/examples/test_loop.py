"""--resume, with a fake trainer that records its first step."""

import argparse
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from examples.checkpoint import Checkpoint
from examples.config import LOG_NAME, PRESETS
from examples.data import Text
from examples.loop import train

CONFIG = replace(PRESETS["tiny"], steps=4, eval_every=2)


class FakeTrainer:
    """A trainer whose weights never change."""

    is_writer = True
    first_steps: ClassVar[list[int]] = []

    def __init__(self, config, precision: str, ep: int, start: Checkpoint) -> None:
        self.first_steps.append(start.step)
        self.start = start

    def step(self, step: int, batch: np.ndarray) -> dict[str, float]:
        return {"loss": 5.5, "aux_loss": 1.0, "grad_norm": 1.0}

    def evaluate(self, text: Text) -> float:
        return 5.5

    def state(self, step: int) -> Checkpoint:
        return replace(self.start, step=step)


def run(out: Path, resume: bool) -> int:
    """Train in `out`. Returns the first step."""
    args = Namespace(data=Path(argparse.__file__), out=out, resume=resume, init_from=None, precision="bf16", ep=1)
    train("fake", args, CONFIG, FakeTrainer)
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
    with pytest.raises(SystemExit, match=r"fake: error: --resume: .*every checkpoint is damaged: step-000002, step-0"):
        run(tmp_path, resume=True)
    assert (tmp_path / LOG_NAME).read_bytes() == log
