"""Checkpoints are complete or absent. Resume takes the last complete one and rejects another run's."""

import json
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from examples.training.checkpoint import Checkpoint, load_checkpoint, load_weights, save_checkpoint
from examples.training.config import describe
from examples.training.weights import initial_weights, weight_shapes

from .faulty_saves import RUN, STEP, TINY, state

ROOT = Path(__file__).parents[3]


def assert_same(a: Checkpoint, b: Checkpoint) -> None:
    assert a.step == b.step
    for left, right in ((a.weights, b.weights), (a.first, b.first), (a.second, b.second)):
        assert left.keys() == right.keys()
        for name in left:
            np.testing.assert_array_equal(left[name], right[name])


def test_a_checkpoint_round_trips_and_the_last_two_stay(tmp_path):
    for step in (5, 10, 15):
        folder = save_checkpoint(tmp_path, state(step), RUN)
    loaded = load_checkpoint(tmp_path, RUN)
    assert loaded is not None
    assert_same(loaded, state(15))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000010", "step-000015"]
    weights = load_file(folder / "weights.safetensors")
    assert {n: a.shape for n, a in weights.items()} == weight_shapes(TINY)
    assert {a.dtype for a in weights.values()} == {np.dtype(np.float32)}


def test_no_checkpoint(tmp_path):
    assert load_checkpoint(tmp_path, RUN) is None
    assert load_checkpoint(tmp_path / "nowhere", RUN) is None


def test_a_kill_while_saving_leaves_the_previous_checkpoint(tmp_path, monkeypatch):
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


@pytest.fixture(scope="module")
def before_save(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Complete checkpoints of steps 5 and 10, a damaged one of the saved step, and the rest of a killed save."""
    base = tmp_path_factory.mktemp("before")
    for step in (5, 10, STEP):
        save_checkpoint(base, state(step), RUN)
    save_checkpoint(base / "other", state(5), RUN).rename(base / "step-000005")
    (base / "other").rmdir()
    shutil.copytree(base / "step-000005", base / f"step-{STEP:06d}.partial")
    flip_last_bit(base / f"step-{STEP:06d}" / "weights.safetensors")
    return base


@pytest.mark.parametrize("kind", ["kill", "full"])
def test_a_fault_at_any_file_operation_leaves_a_complete_checkpoint(tmp_path, before_save, kind):
    """The process of the save is killed, or its disk is full, at the n-th operation, for all n."""
    command = [sys.executable, "-m", "tests.examples.training.faulty_saves", kind, str(before_save), str(tmp_path)]
    told = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    saves = [json.loads(line) for line in told.splitlines()]
    operations = [save["operation"] for save in saves]
    renamed = operations.index(f"rename step-{STEP:06d}.partial")
    for file in ("weights.safetensors", "optimizer.safetensors", "meta.json"):
        first = operations.index(f"open {file}")
        assert operations[first : first + 3] == [f"open {file}", f"write {file}", f"fsync {file}"]
        assert operations.count(f"remove {file}") == 3, "the partial, the damaged and the oldest checkpoint"
    for number, save in enumerate(saves):
        out = tmp_path / str(number + 1)
        loaded = load_checkpoint(out, RUN)
        assert loaded is not None
        assert_same(loaded, state(STEP if number > renamed else 10))
        faulty = number + 1 < len(saves)
        assert save["signal"] == (-signal.SIGKILL if kind == "kill" and faulty else 0)
        if kind == "full" and faulty and save["error"]:
            file = save["operation"].partition(" ")[2]
            assert re.match(r"\[Errno 28\] (checkpoint: )?No space left on device", save["error"])
            assert file in save["error"].rpartition(": '")[2], save
            if number <= renamed + 2:
                assert (
                    "; free space or allow writing, then pass --resume, which continues from the last" in save["error"]
                )
                assert not list(out.glob("*.partial")), "the space is free again"
        save_checkpoint(out, state(STEP), RUN)
        loaded = load_checkpoint(out, RUN)
        assert loaded is not None
        assert_same(loaded, state(STEP))
        assert sorted(p.name for p in out.iterdir()) == ["step-000010", f"step-{STEP:06d}"]


def test_a_full_disk_ends_the_save_with_the_file(tmp_path):
    """A limit of the size of files, which the system enforces when bytes are written."""
    code = (
        "import resource, sys; from pathlib import Path; from tests.examples.training.faulty_saves import *;"
        "save_checkpoint(Path(sys.argv[1]), state(10), RUN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY));"
        "save_checkpoint(Path(sys.argv[1]), state(15), RUN)"
    )
    run = subprocess.run([sys.executable, "-c", code, tmp_path], cwd=ROOT, capture_output=True, text=True)
    told = r"checkpoint: File too large; free space .* --resume, .*: '.*step-000015.partial/weights.safetensors'"
    assert re.search(told, run.stderr), run.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["step-000010"]
    loaded = load_checkpoint(tmp_path, RUN)
    assert loaded is not None
    assert_same(loaded, state(10))


def test_every_byte_of_a_checkpoint_is_checked(tmp_path, capsys):
    """A bit of each byte of meta.json, and of bytes of the other files, and files of any length below theirs."""
    for step in (5, 10):
        folder = save_checkpoint(tmp_path, state(step), RUN)
    for file in sorted(folder.iterdir()):
        data = file.read_bytes()
        positions = range(0, len(data), 1 if file.name == "meta.json" else len(data) // 20)
        flipped = (data[:i] + bytes([data[i] ^ 1 << i % 8]) + data[i + 1 :] for i in positions)
        for damaged in (*flipped, *(data[:i] for i in range(0, len(data), len(data) // 20))):
            file.write_bytes(damaged)
            loaded = load_checkpoint(tmp_path, RUN)
            assert loaded is not None
            assert loaded.step == 5, (file.name, damaged)
            told = capsys.readouterr().err
            assert "step-000010 is damaged and is skipped: " in told
            assert file.name in told, told
        file.write_bytes(data)
    loaded = load_checkpoint(tmp_path, RUN)
    assert loaded is not None
    assert_same(loaded, state(10))


def test_folders_of_later_steps_do_not_replace_the_new_checkpoint(tmp_path):
    for later in ("step-000090", "step-1000000", "step-notes"):
        (tmp_path / later).mkdir()
    for step in (5, 10, 15):
        assert save_checkpoint(tmp_path, state(step), RUN).is_dir()
    kept = sorted(p.name for p in tmp_path.iterdir())
    assert kept == ["step-000010", "step-000015", "step-000090", "step-1000000", "step-notes"]


def test_steps_are_sorted_as_numbers(tmp_path):
    for step in (999_999, 1_000_000):
        save_checkpoint(tmp_path, state(step), RUN)
    loaded = load_checkpoint(tmp_path, RUN | {"steps": 1_000_000})
    assert loaded is not None
    assert loaded.step == 1_000_000


def flip_last_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def without(name: str):
    def rewrite(folder: Path) -> None:
        meta = json.loads((folder / "meta.json").read_text())
        del meta[name]
        (folder / "meta.json").write_text(json.dumps(meta))

    return rewrite


DAMAGES = {
    "truncated": lambda f: (f / "weights.safetensors").write_bytes((f / "weights.safetensors").read_bytes()[:-1]),
    "missing": lambda f: (f / "weights.safetensors").unlink(),
    "one bit of a weight": lambda f: flip_last_bit(f / "weights.safetensors"),
    "one bit of a moment": lambda f: flip_last_bit(f / "optimizer.safetensors"),
    "no meta": lambda f: (f / "meta.json").unlink(),
    "meta {}": lambda f: (f / "meta.json").write_text("{}"),
    "meta null": lambda f: (f / "meta.json").write_text("null"),
    "meta []": lambda f: (f / "meta.json").write_text("[]"),
    "no config": without("config"),
    "no step": without("step"),
    "no hashes": without("sha256"),
}


EVERY_ONE = (
    r"--resume: .*every checkpoint is damaged: step-000010: optimizer.safetensors has SHA-256 .*; "
    r"step-000005: optimizer.safetensors has SHA-256 .*; restore one or pass another --out"
)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_skipped_with_a_warning(tmp_path, capsys, damage):
    for step in (5, 10):
        folder = save_checkpoint(tmp_path, state(step), RUN)
    DAMAGES[damage](folder)
    loaded = load_checkpoint(tmp_path, RUN)
    assert loaded is not None
    assert_same(loaded, state(5))
    assert "step-000010 is damaged" in capsys.readouterr().err


def test_damage_in_every_checkpoint_is_an_error(tmp_path):
    for step in (5, 10):
        flip_last_bit(save_checkpoint(tmp_path, state(step), RUN) / "optimizer.safetensors")
    with pytest.raises(ValueError, match=EVERY_ONE):
        load_checkpoint(tmp_path, RUN)


def test_a_checkpoint_of_another_run_is_an_error(tmp_path):
    save_checkpoint(tmp_path, state(5), RUN)
    with pytest.raises(
        ValueError, match=r"--resume: .*another run: recipe is mxfp8 there and bf16 here.*seed is 0 there"
    ):
        load_checkpoint(tmp_path, describe(replace(TINY, seed=3), recipe="bf16"))


def test_weights_of_another_shape_are_an_error(tmp_path):
    folder = save_checkpoint(tmp_path, state(5), RUN)
    wider = weight_shapes(replace(TINY, hidden_dim=64))
    with pytest.raises(ValueError, match=r"--init-from: .*w1 is \(8, 32, 32\), this config has \(8, 64, 32\).*6 such"):
        load_weights(folder, wider)
    with pytest.raises(ValueError, match=r"--init-from: .*checkpoint folder with weights.safetensors"):
        load_weights(tmp_path, weight_shapes(TINY))


@pytest.mark.parametrize("damage", ["truncated", "one bit of a weight", "meta {}", "meta null", "meta []"])
def test_damaged_weights_are_an_error(tmp_path, damage):
    folder = save_checkpoint(tmp_path, state(5), RUN)
    DAMAGES[damage](folder)
    with pytest.raises(ValueError, match=r"--init-from: .*weights.safetensors is damaged"):
        load_weights(folder, weight_shapes(TINY))


def test_truncated_weights_without_meta_are_an_error(tmp_path):
    folder = save_checkpoint(tmp_path, state(5), RUN)
    DAMAGES["truncated"](folder)
    (folder / "meta.json").unlink()
    with pytest.raises(ValueError, match=r"--init-from: .*weights.safetensors is damaged"):
        load_weights(folder, weight_shapes(TINY))


def test_bf16_weights_load_as_fp32(tmp_path):
    rounded = {n: a.astype(ml_dtypes.bfloat16) for n, a in initial_weights(TINY).items()}
    save_file(rounded, tmp_path / "weights.safetensors")
    loaded = load_weights(tmp_path, weight_shapes(TINY))
    assert {a.dtype for a in loaded.values()} == {np.dtype(np.float32)}
    for name, array in rounded.items():
        np.testing.assert_array_equal(loaded[name], array.astype(np.float32))
    # A new process: this one has imported ml_dtypes, which would hide a missing import in examples.training.checkpoint.
    code = (
        "import sys; from pathlib import Path; from examples.training.config import PRESETS;"
        "from examples.training.weights import weight_shapes;"
        "from examples.training.checkpoint import load_weights;"
        "load_weights(Path(sys.argv[1]), weight_shapes(PRESETS['tiny']))"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, check=True)


def test_integer_weights_are_an_error(tmp_path):
    save_file({n: a.astype(np.int8) for n, a in initial_weights(TINY).items()}, tmp_path / "weights.safetensors")
    with pytest.raises(ValueError, match=r"--init-from: .* is int8; allowed: float16, bfloat16, float32"):
        load_weights(tmp_path, weight_shapes(TINY))
