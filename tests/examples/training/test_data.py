"""Text and batches are deterministic and split by file. Errors name the flag."""

import sysconfig
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from examples.training.config import PRESETS
from examples.training.data import HOLD_OUT_EVERY, Text, library_files

TINY = PRESETS["tiny"]


def write_files(root: Path, count: int) -> Path:
    """Write `count` files; file i holds 100 bytes of value i."""
    for i in range(count):
        (root / f"{i:02d}.txt").write_bytes(bytes([i]) * 100)
    return root


def test_library_files_exclude_installed_packages():
    files = library_files()
    names = {p.relative_to(sysconfig.get_path("stdlib")).as_posix() for p in files}
    assert {"argparse.py", "json/decoder.py", "asyncio/tasks.py"} <= names
    assert not any("site-packages" in name for name in names)
    assert files == library_files()


def test_every_tenth_file_is_held_out(tmp_path):
    text = Text.load(write_files(tmp_path, 25), TINY)
    assert set(text.held_out) == {9, 19}
    assert set(text.train) == set(range(25)) - {9, 19}
    assert HOLD_OUT_EVERY == 10


def test_fewer_than_ten_files_hold_out_the_last(tmp_path):
    text = Text.load(write_files(tmp_path, 3), TINY)
    assert (set(text.train), set(text.held_out)) == ({0, 1}, {2})


def test_one_file_holds_out_its_last_tenth(tmp_path):
    (tmp_path / "a.txt").write_bytes(bytes(range(200)) * 5)
    text = Text.load(tmp_path / "a.txt", TINY)
    assert (len(text.train), len(text.held_out)) == (900, 100)
    assert text.held_out.tolist() == list(range(100, 200))


def test_hidden_files_are_left_out(tmp_path):
    write_files(tmp_path, 2)
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "index").write_bytes(b"\xff" * 100)
    assert 255 not in Text.load(tmp_path, TINY).train


def test_batches_depend_on_seed_and_step_alone(tmp_path):
    (tmp_path / "a.txt").write_bytes(np.random.default_rng(0).bytes(5000))
    text, again = (Text.load(tmp_path, TINY) for _ in range(2))
    batch = text.batch(7)
    assert batch.shape == (TINY.batch_size, TINY.seq_len + 1)
    assert batch.dtype == np.int32
    np.testing.assert_array_equal(batch, again.batch(7))
    assert not np.array_equal(batch, text.batch(8))
    assert not np.array_equal(batch, Text.load(tmp_path, replace(TINY, seed=1)).batch(7))
    joined = text.train.tobytes()
    assert all(row.astype(np.uint8).tobytes() in joined for row in batch)


def test_eval_batches_cover_the_held_out_text_from_start_to_end(tmp_path):
    (tmp_path / "a.txt").write_bytes(np.random.default_rng(0).bytes(9000))
    text = Text.load(tmp_path, TINY)
    rows = np.concatenate(list(text.eval_batches()))
    assert rows.shape == (TINY.eval_sequences, TINY.seq_len + 1)
    np.testing.assert_array_equal(rows[0], text.held_out[: TINY.seq_len + 1])
    np.testing.assert_array_equal(rows[-1], text.held_out[-TINY.seq_len - 1 :])


def test_an_error_names_the_bad_data(tmp_path):
    with pytest.raises(ValueError, match=r"--data: .*nowhere.*does not exist"):
        Text.load(tmp_path / "nowhere", TINY)
    with pytest.raises(ValueError, match=r"--data: .*without files"):
        Text.load(tmp_path, TINY)
    (tmp_path / "a.txt").write_bytes(b"x" * 100)
    with pytest.raises(ValueError, match=r"--data: got 10 bytes of held-out text.*at least 33"):
        Text.load(tmp_path, TINY)
