"""Text as bytes, and batches that depend on (seed, step) alone.

    files, sorted --every 10th--> held out: --evenly spaced windows--> eval_batches
                  --the others--> train:    --windows drawn from (seed, step)--> batch(step)

Batches are numpy arrays, so PyTorch and JAX train on the same tokens. A rank takes its slice of the
global batch, so the number of ranks does not change the tokens.
"""

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .config import Config

HOLD_OUT_EVERY = 10
INSTALLED_PACKAGES = {"site-packages", "dist-packages"}  # subfolders of the standard library


def library_files() -> list[Path]:
    """Every `.py` file of the standard library, sorted by relative path."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [p for p in root.rglob("*.py") if INSTALLED_PACKAGES.isdisjoint(p.parts)]
    return sorted((p for p in files if p.is_file()), key=lambda p: p.relative_to(root).parts)


def text_files(path: Path) -> list[Path]:
    """`path` itself if it is a file, otherwise all files below it, sorted, without hidden files.

    Raises ValueError when `path` does not exist or has no file below it."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ValueError(f"--data: got {str(path)!r}, which does not exist; allowed: a text file or a folder of them")
    relative = (p.relative_to(path) for p in path.rglob("*") if p.is_file())
    files = sorted((p for p in relative if not any(part.startswith(".") for part in p.parts)), key=lambda p: p.parts)
    if not files:
        raise ValueError(f"--data: got {str(path)!r}, a folder without files; allowed: a text file or a folder of them")
    return [path / p for p in files]


@dataclass(frozen=True)
class Text:
    """Training and held-out text, uint8 each, and the batches of windows cut from them."""

    train: np.ndarray
    held_out: np.ndarray
    config: Config

    @classmethod
    def load(cls, path: Path | None, config: Config) -> "Text":
        """Read `path`, or the standard library if `path` is None, and hold out every tenth file.

        Fewer than ten files hold out the last file; a single file holds out its last tenth.

        Raises ValueError when the training or the held-out text is too short for one sequence."""
        files = library_files() if path is None else text_files(path)
        parts = [np.frombuffer(file.read_bytes(), np.uint8) for file in files]
        if len(parts) == 1:
            cut = len(parts[0]) - len(parts[0]) // HOLD_OUT_EVERY
            train, held_out = parts[0][:cut], parts[0][cut:]
        else:
            last = min(HOLD_OUT_EVERY, len(parts)) - 1
            held_out = np.concatenate(parts[last::HOLD_OUT_EVERY])
            train = np.concatenate([part for i, part in enumerate(parts) if i % HOLD_OUT_EVERY != last])
        for name, text in (("training", train), ("held-out", held_out)):
            if len(text) <= config.seq_len:
                raise ValueError(
                    f"--data: got {len(text)} bytes of {name} text in {len(files)} file(s) of {path or 'the library'}; "
                    f"allowed: at least {config.seq_len + 1}, one sequence and the byte after it"
                )
        return cls(train, held_out, config)

    def batch(self, step: int) -> np.ndarray:
        """Tokens of one step, (batch_size, seq_len + 1) int32: inputs are [:, :-1], targets [:, 1:]."""
        rng = np.random.default_rng((self.config.seed, step))
        return self._windows(self.train, rng.integers(0, len(self.train) - self.config.seq_len, self.config.batch_size))

    def eval_batches(self) -> Iterator[np.ndarray]:
        """The `eval_sequences` held-out windows, the same in every call, in batches of at most `batch_size`."""
        starts = np.linspace(0, len(self.held_out) - self.config.seq_len - 1, self.config.eval_sequences).astype(int)
        for i in range(0, len(starts), self.config.batch_size):
            yield self._windows(self.held_out, starts[i : i + self.config.batch_size])

    def _windows(self, text: np.ndarray, starts: np.ndarray) -> np.ndarray:
        return text[starts[:, None] + np.arange(self.config.seq_len + 1)].astype(np.int32)
