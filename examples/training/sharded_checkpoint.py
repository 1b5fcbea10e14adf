"""Sharded checkpoints of train_jax, by Orbax: every process writes and reads the parts of its own devices.

FOLDER/<step>/arrays   weights and AdamW's moments, as they are sharded on the mesh
              run      step and config, JSON
              SHA256SUMS

A run with another mesh reads the same checkpoint: each device reads the parts that it has there. Orbax does not notice
a changed byte in the arrays. One process writes the SHA-256 of all files when they are complete, and every process
checks all files before it loads them: a checkpoint without SHA256SUMS was not completed.
"""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from jax.sharding import Sharding

from .checkpoint import KEEP, REMEDY, Checkpoint, check_same_run, hash_of, write_file

SUMS = "SHA256SUMS"
Shapes = Mapping[str, tuple[int, ...]]


class ShardedCheckpoints:
    """`load` and `save` of the loop. shapes: of every weight. sharding_of: the place of a weight and its moments.
    scan_layers: whether the weights of all layers are stacked, which a later run has to repeat."""

    def __init__(self, folder: Path, shapes: Shapes, sharding_of: Callable[[str], Sharding], scan_layers: bool) -> None:
        options = ocp.CheckpointManagerOptions(max_to_keep=KEEP, enable_async_checkpointing=False)
        self.layout = {"scan_layers": scan_layers}
        self.folder = folder.absolute()
        self.manager = ocp.CheckpointManager(self.folder, options=options)
        self.like = {
            name: jax.ShapeDtypeStruct(shape, "float32", sharding=sharding_of(name)) for name, shape in shapes.items()
        }

    def load(self, _out: Path, config: Mapping[str, Any]) -> Checkpoint | None:
        """The last complete checkpoint on this run's mesh, None without one. Raises ValueError when every checkpoint is
        damaged, and for one of another config."""
        damaged = []
        for step in sorted(self.manager.all_steps(), reverse=True):
            folder = self.folder / str(step)
            try:
                check_sums(folder)
            except (OSError, ValueError) as error:
                print(f"checkpoint: {folder} is damaged and is skipped: {error}", file=sys.stderr)
                damaged.append(f"{step}: {error}")
                continue
            meta = self.manager.restore(step, args=ocp.args.Composite(run=ocp.args.JsonRestore()))["run"]
            check_same_run(folder, meta, {**config, **self.layout})
            trees = dict.fromkeys(("weights", "first", "second"), self.like)
            found = self.manager.restore(step, args=ocp.args.Composite(arrays=ocp.args.StandardRestore(trees)))
            return Checkpoint(step, **found["arrays"])
        if damaged:
            names = f"every checkpoint is damaged: {'; '.join(damaged)}"
            raise ValueError(f"--resume: {self.folder}: {names}; restore one or pass another --out")
        return None

    def save(self, _out: Path, state: Checkpoint, config: Mapping[str, Any]) -> None:
        """Collective: every process calls it. Raises OSError, with the name of the file, when the disk is full."""
        for step in self.manager.all_steps():
            if step >= state.step:  # damaged: a run continues from its last complete checkpoint
                self.manager.delete(step)
        trees = {"weights": state.weights, "first": state.first, "second": state.second}
        run = ocp.args.JsonSave({"step": state.step, "config": {**config, **self.layout}})
        try:
            self.manager.save(state.step, args=ocp.args.Composite(arrays=ocp.args.StandardSave(trees), run=run))
            if jax.process_index() == 0:
                write_sums(self.folder / str(state.step))
        except (OSError, ValueError) as error:  # TensorStore raises ValueError
            raise OSError(f"checkpoint: {error}; {REMEDY}") from error


def write_sums(folder: Path) -> None:
    """SHA256SUMS of all files in `folder`, as `sha256sum -c` reads it."""
    partial = folder / f"{SUMS}.partial"
    lines = [f"{hash_of(folder / name)}  {name}\n" for name in files_in(folder)]
    write_file(partial, "".join(lines).encode())
    partial.rename(folder / SUMS)


def check_sums(folder: Path) -> None:
    """Raise ValueError or OSError, with the name of the file, unless all files are as they were written."""
    if not (folder / SUMS).is_file():
        raise ValueError(f"{SUMS} is missing: the checkpoint was not completed")
    lines = (folder / SUMS).read_text(errors="replace").splitlines()
    expected = {name: hash_of_file for hash_of_file, _, name in (line.partition("  ") for line in lines)}
    if differ := sorted(expected.keys() ^ set(files_in(folder))):
        raise ValueError(f"{differ[0]!r} is a file or a line of {SUMS}, not both")
    for name, hash_of_file in expected.items():
        found = hash_of(folder / name)
        if found != hash_of_file:
            raise ValueError(f"{name} has SHA-256 {found}, {SUMS} has {hash_of_file}")


def files_in(folder: Path) -> list[str]:
    """The files of a checkpoint but SHA256SUMS."""
    files = (str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())
    return sorted(name for name in files if not name.startswith(SUMS))
