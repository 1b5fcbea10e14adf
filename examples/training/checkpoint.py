"""Checkpoints that both frameworks write and read.

    DIR/step-000050/weights.safetensors     fp32, names of weights.py, experts unsharded (E, ...)
                    optimizer.safetensors   AdamW's moments first.<name> and second.<name>, fp32
                    meta.json               step, config, SHA-256 of the two files

A checkpoint is written under a temporary name, flushed to disk and then renamed, so a folder with the
final name is complete. A resumed run continues exactly: a checkpoint holds the step, the weights and the
moments, and a batch depends on (seed, step) alone.
"""

import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  registers the numpy dtype that safetensors returns for bf16
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

KEEP = 2
FILES = ("weights.safetensors", "optimizer.safetensors")
FLOATS = ("float16", "bfloat16", "float32", "float64")
Arrays = Mapping[str, np.ndarray]
# Fields of the config that may differ in a resumed run: its end, and how often it reports.
MAY_DIFFER = {"steps", "log_every", "eval_every", "checkpoint_every"}


@dataclass(frozen=True)
class Checkpoint:
    """Unsharded weights and AdamW moments after `step` updates."""

    step: int
    weights: Arrays
    first: Arrays
    second: Arrays


def save_checkpoint(out: Path, state: Checkpoint, config: Mapping[str, Any]) -> Path:
    """Write `out/step-NNNNNN` atomically, then delete all but the last two checkpoints up to this step.

    Checkpoints of later steps stay. They belong to another run, because a run resumes from its last checkpoint."""
    target = out / f"step-{state.step:06d}"
    partial = out / f"{target.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    moments = {f"first.{n}": a for n, a in state.first.items()} | {f"second.{n}": a for n, a in state.second.items()}
    hashes = {}
    for name, arrays in zip(FILES, (state.weights, moments), strict=True):
        hashes[name] = _write(partial / name, save({n: np.ascontiguousarray(a) for n, a in arrays.items()}))
    meta = {"step": state.step, "config": config, "sha256": hashes}
    _write(partial / "meta.json", json.dumps(meta, indent=2).encode())
    _sync_folder(partial)
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)
    _sync_folder(out)
    for old in [folder for folder in step_folders(out) if _step(folder) <= state.step][:-KEEP]:
        shutil.rmtree(old)
    return target


def load_checkpoint(out: Path, config: Mapping[str, Any]) -> Checkpoint | None:
    """The last complete checkpoint in `out`, or None if `out` holds no checkpoint.

    Raises ValueError when every checkpoint is damaged, when the last complete one has another config (the message
    names the fields that differ), and when it is of a later step than `steps`."""
    folders = step_folders(out)
    for folder in reversed(folders):
        try:
            meta = _read_meta(folder)
            weights = load_file(folder / "weights.safetensors")
            moments = load_file(folder / "optimizer.safetensors")
        except (OSError, ValueError, SafetensorError) as error:
            print(f"checkpoint: {folder} is damaged and is skipped: {error}", file=sys.stderr)
            continue
        check_same_run(folder, meta, config)
        first = {n.removeprefix("first."): a for n, a in moments.items() if n.startswith("first.")}
        second = {n.removeprefix("second."): a for n, a in moments.items() if n.startswith("second.")}
        return Checkpoint(meta["step"], weights, first, second)
    if folders:
        names = ", ".join(folder.name for folder in folders)
        raise ValueError(f"--resume: {out}: every checkpoint is damaged: {names}; restore one or pass another --out")
    return None


def check_same_run(folder: Path, meta: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Raise ValueError unless a run with `config` may continue from a checkpoint with `meta`."""
    fields = (config.keys() | meta["config"].keys()) - MAY_DIFFER
    differ = sorted(k for k in fields if config.get(k) != meta["config"].get(k))
    if differ:
        values = ", ".join(f"{k} is {meta['config'].get(k)} there and {config.get(k)} here" for k in differ)
        raise ValueError(f"--resume: {folder} belongs to another run: {values}; pass its flags or another --out")
    if meta["step"] > config["steps"]:
        allowed = f"allowed: at least {meta['step']}, the step of {folder}"
        raise ValueError(f"--steps: got {config['steps']} with --resume; {allowed}")


def load_weights(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """The weights of one checkpoint folder, cast to fp32.

    meta.json is optional, so weights of other programs load too. If it exists, its SHA-256 must match.

    Raises ValueError when the weights are missing, damaged or not floats, and when their names and shapes
    differ from `shapes`."""
    file = folder / FILES[0]
    if not file.is_file():
        raise ValueError(f"--init-from: got {str(folder)!r}; allowed: a checkpoint folder with {file.name} in it")
    try:
        if (folder / "meta.json").exists():
            _check_hash(file, _meta_hashes(_read_json(folder)))
        weights = load_file(file)
    except (OSError, ValueError, TypeError, SafetensorError) as error:  # TypeError: numpy lacks the dtype
        raise ValueError(f"--init-from: {file} is damaged or has no numpy dtype: {error}") from error
    not_floats = sorted(f"{name} is {array.dtype}" for name, array in weights.items() if array.dtype.name not in FLOATS)
    if not_floats:
        raise ValueError(f"--init-from: {file}: {not_floats[0]}; allowed: {', '.join(FLOATS)}")
    found = {name: array.shape for name, array in weights.items()}
    if found != dict(shapes):
        differ = sorted(n for n in found.keys() | shapes.keys() if found.get(n) != shapes.get(n))
        one = differ[0]
        raise ValueError(
            f"--init-from: {file}: {one} is {found.get(one)}, this config has {shapes.get(one)} "
            f"({len(differ)} such weights); pass the flags of the run that wrote it"
        )
    return {name: array.astype(np.float32, copy=False) for name, array in weights.items()}


def step_folders(out: Path) -> list[Path]:
    """The complete checkpoint folders in `out`, sorted by step."""
    return sorted((p for p in out.glob("step-*") if re.fullmatch(r"step-\d+", p.name) and p.is_dir()), key=_step)


def _step(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def _read_meta(folder: Path) -> dict[str, Any]:
    """Read meta.json and check the SHA-256 of the two files. Raises ValueError."""
    meta = _read_json(folder)
    hashes = _meta_hashes(meta)
    if not isinstance(meta.get("config"), dict):
        raise ValueError("meta.json has no config")
    if meta.get("step") != _step(folder):
        raise ValueError(f"meta.json has step {meta.get('step')}")
    for name in FILES:
        _check_hash(folder / name, hashes)
    return meta


def _read_json(folder: Path) -> dict[str, Any]:
    meta = json.loads((folder / "meta.json").read_bytes())
    if not isinstance(meta, dict):
        raise ValueError(f"meta.json holds a {type(meta).__name__}, not an object")
    return meta


def _meta_hashes(meta: Mapping[str, Any]) -> Mapping[str, Any]:
    hashes = meta.get("sha256")
    if not isinstance(hashes, dict):
        raise ValueError("meta.json has no sha256 of the files")
    return hashes


def _check_hash(file: Path, hashes: Mapping[str, Any]) -> None:
    with file.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != hashes.get(file.name):
        raise ValueError(f"{file.name} has SHA-256 {found}, meta.json has {hashes.get(file.name)}")


def _write(path: Path, data: bytes) -> str:
    """Write and flush to disk. Returns the SHA-256 of `data`."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return hashlib.sha256(data).hexdigest()


def _sync_folder(path: Path) -> None:
    """fsync the folder, so that a rename inside it reaches the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
