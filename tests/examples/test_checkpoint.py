"""Checkpoints are whole or absent; resume takes the last whole one and refuses another run's."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from examples.checkpoint import Checkpoint, load_checkpoint, load_weights, save_checkpoint
from examples.config import PRESETS, describe
from examples.weights import initial_weights, weight_shapes

TINY = PRESETS["tiny"]
RUN = describe(TINY, precision="mxfp8")


def state(step: int) -> Checkpoint:
    weights = initial_weights(replace(TINY, seed=step))
    return Checkpoint(step, weights, {n: a + 1 for n, a in weights.items()}, {n: a + 2 for n, a in weights.items()})


def assert_same(a: Checkpoint, b: Checkpoint) -> None:
    assert a.step == b.step
    for ours, theirs in ((a.weights, b.weights), (a.first, b.first), (a.second, b.second)):
        assert ours.keys() == theirs.keys()
        for name in ours:
            np.testing.assert_array_equal(ours[name], theirs[name])


def test_round_trip_and_the_last_two_are_kept(tmp_path):
    for step in (5, 10, 15):
        folder = save_checkpoint(tmp_path, state(step), RUN)
    loaded = load_checkpoint(tmp_path, RUN)
    assert loaded is not None
    assert_same(loaded, state(15))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000010", "step-000015"]
    plain = load_file(folder / "weights.safetensors")
    assert {n: a.shape for n, a in plain.items()} == weight_shapes(TINY)
    assert {a.dtype for a in plain.values()} == {np.dtype(np.float32)}


def test_no_checkpoint(tmp_path):
    assert load_checkpoint(tmp_path, RUN) is None
    assert load_checkpoint(tmp_path / "nowhere", RUN) is None


def test_killed_while_saving_leaves_the_one_before(tmp_path, monkeypatch):
    save_checkpoint(tmp_path, state(5), RUN)

    def killed(self: Path, target: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(tmp_path, state(10), RUN)
    monkeypatch.undo()
    assert (tmp_path / "step-000010.partial" / "weights.safetensors").exists()
    loaded = load_checkpoint(tmp_path, RUN)
    assert loaded is not None
    assert_same(loaded, state(5))
    save_checkpoint(tmp_path, state(10), RUN)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000005", "step-000010"]


@pytest.mark.parametrize("damage", ["truncated", "missing", "no meta"])
def test_a_damaged_one_is_passed_over_and_said(tmp_path, capsys, damage):
    for step in (5, 10):
        folder = save_checkpoint(tmp_path, state(step), RUN)
    weights = folder / "weights.safetensors"
    if damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:-1])
    else:
        (weights if damage == "missing" else folder / "meta.json").unlink()
    loaded = load_checkpoint(tmp_path, RUN)
    assert loaded is not None
    assert_same(loaded, state(5))
    assert "step-000010 is damaged" in capsys.readouterr().err


def test_another_run_is_refused(tmp_path):
    save_checkpoint(tmp_path, state(5), RUN)
    with pytest.raises(ValueError, match=r"--resume: .*another run: precision=mxfp8 there, bf16 here.*seed=0 there"):
        load_checkpoint(tmp_path, describe(replace(TINY, seed=3), precision="bf16"))


def test_weights_of_another_shape_are_refused(tmp_path):
    folder = save_checkpoint(tmp_path, state(5), RUN)
    wider = weight_shapes(replace(TINY, hidden_dim=64))
    with pytest.raises(ValueError, match=r"--init-from: .*w1 is \(8, 32, 32\), this config has \(8, 64, 32\).*6 such"):
        load_weights(folder, wider)
    with pytest.raises(ValueError, match=r"--init-from: .*checkpoint folder with weights.safetensors"):
        load_weights(tmp_path, weight_shapes(TINY))
