"""Checkpoints that either framework writes and either framework reads.

    DIR/step-000050/weights.safetensors     fp32, names of weights.py, experts whole (E, ...)
                    optimizer.safetensors   AdamW's first.<name> and second.<name> moments, fp32
                    meta.json               step, config, sizes of the two files

A checkpoint is written under a temporary name, flushed to the disk and renamed, so one that has its
name is whole. With the step, the moments and the weights a run goes on exactly: batches depend on
(seed, step) alone.
"""

import json
import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

KEEP = 2
Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Checkpoint:
    """The state of a run after `step` updates: weights and AdamW's two moments, all whole."""

    step: int
    weights: Arrays
    first: Arrays
    second: Arrays


def save_checkpoint(out: Path, state: Checkpoint, config: Mapping[str, Any]) -> Path:
    """Write `out/step-NNNNNN`, whole or not at all, and drop all but the last two."""
    target = out / f"step-{state.step:06d}"
    partial = out / f"{target.name}.partial"
    for stale in (partial, target):
        shutil.rmtree(stale, ignore_errors=True)
    partial.mkdir(parents=True)
    moments = {f"first.{n}": a for n, a in state.first.items()} | {f"second.{n}": a for n, a in state.second.items()}
    sizes = {}
    for name, arrays in (("weights.safetensors", state.weights), ("optimizer.safetensors", moments)):
        sizes[name] = _write(partial / name, save({n: np.ascontiguousarray(a) for n, a in arrays.items()}))
    meta = {"step": state.step, "config": config, "sizes": sizes}
    _write(partial / "meta.json", json.dumps(meta, indent=2).encode())
    _sync_folder(partial)
    partial.rename(target)
    _sync_folder(out)
    for old in _folders(out)[:-KEEP]:
        shutil.rmtree(old)
    return target


def load_checkpoint(out: Path, config: Mapping[str, Any]) -> Checkpoint | None:
    """The last whole checkpoint in `out`, or None when there is none.

    Raises ValueError when it was written by a run with another config, naming the fields."""
    for folder in reversed(_folders(out)):
        try:
            meta = _read_meta(folder)
            weights = load_file(folder / "weights.safetensors")
            moments = load_file(folder / "optimizer.safetensors")
        except (OSError, ValueError, SafetensorError) as error:
            print(f"checkpoint: {folder} is damaged, trying the one before: {error}", file=sys.stderr)
            continue
        differ = sorted(k for k in config.keys() | meta["config"].keys() if config.get(k) != meta["config"].get(k))
        if differ:
            there = ", ".join(f"{k}={meta['config'].get(k)} there, {config.get(k)} here" for k in differ)
            raise ValueError(f"--resume: {folder} belongs to another run: {there}; pass its flags or another --out")
        first = {n.removeprefix("first."): a for n, a in moments.items() if n.startswith("first.")}
        second = {n.removeprefix("second."): a for n, a in moments.items() if n.startswith("second.")}
        return Checkpoint(meta["step"], weights, first, second)
    return None


def load_weights(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """The weights of one checkpoint folder.

    Raises ValueError when there are none or when their names and shapes are not `shapes`."""
    file = folder / "weights.safetensors"
    if not file.is_file():
        raise ValueError(f"--init-from: got {str(folder)!r}; allowed: a checkpoint folder with {file.name} in it")
    weights = load_file(file)
    found = {name: array.shape for name, array in weights.items()}
    if found != dict(shapes):
        differ = sorted(n for n in found.keys() | shapes.keys() if found.get(n) != shapes.get(n))
        one = differ[0]
        raise ValueError(
            f"--init-from: {file}: {one} is {found.get(one)}, this config has {shapes.get(one)} "
            f"({len(differ)} such weights); pass the flags of the run that wrote it"
        )
    return weights


def _folders(out: Path) -> list[Path]:
    return sorted(p for p in out.glob("step-*") if p.is_dir() and p.suffix != ".partial")


def _read_meta(folder: Path) -> dict[str, Any]:
    meta = json.loads((folder / "meta.json").read_bytes())
    for name, size in meta["sizes"].items():
        found = (folder / name).stat().st_size
        if found != size:
            raise ValueError(f"{name} has {found} bytes, {size} were written")
    return meta


def _write(path: Path, data: bytes) -> int:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return len(data)


def _sync_folder(path: Path) -> None:
    """The rename itself must reach the disk, which is the folder's to remember."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
