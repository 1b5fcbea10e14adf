"""Checkpoints that both frameworks write and read.

    DIR/step-000050/weights.safetensors     fp32, names of weights.py, experts unsharded (E, ...)
                    optimizer.safetensors   AdamW's moments first.<name> and second.<name>, fp32
                    meta.json               step, config, SHA-256 of the two files and of step and config

A checkpoint is written under a temporary name, flushed to disk and then renamed, so a folder with the
final name is complete. A full disk ends the run with an error and leaves the checkpoints before it. A
resumed run continues exactly: a checkpoint holds the step, the weights and the moments, and a batch
depends on (seed, step) alone.
"""

import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  registers the numpy dtype that safetensors returns for bf16
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

KEEP = 2
FILES = ("weights.safetensors", "optimizer.safetensors")
META = "meta.json"
FLOATS = ("float16", "bfloat16", "float32", "float64")
REMEDY = "free space or allow writing, then pass --resume, which continues from the last complete checkpoint"
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

    Checkpoints of later steps stay. They belong to another run, because a run resumes from its last checkpoint.

    Raises OSError when the disk is full or does not take a file, which the message names; the checkpoints before it
    stay, and what was written of this one is deleted."""
    target = out / f"step-{state.step:06d}"
    partial = out / f"{target.name}.partial"
    try:
        if partial.exists():
            shutil.rmtree(partial)
        partial.mkdir(parents=True)
        _write_files(partial, state, config)
        if target.exists():  # damaged, as a run continues from its last complete checkpoint
            shutil.rmtree(target)
        partial.rename(target)
        _sync_folder(out)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)  # the space that the next run needs
        raise OSError(error.errno, f"checkpoint: {error.strerror}; {REMEDY}", error.filename) from error
    for old in [folder for folder in step_folders(out) if _step(folder) <= state.step][:-KEEP]:
        shutil.rmtree(old)
    return target


def load_checkpoint(out: Path, config: Mapping[str, Any]) -> Checkpoint | None:
    """The last complete checkpoint in `out`, or None if `out` holds no checkpoint.

    Raises ValueError when every checkpoint is damaged, when the last complete one has another config (the message
    names the fields that differ), and when it is of a later step than `steps`."""
    damaged = []
    for folder in reversed(step_folders(out)):
        try:
            meta = _read_meta(folder)
            weights, moments = (_read_arrays(folder / name) for name in FILES)
        except (OSError, ValueError) as error:
            print(f"checkpoint: {folder} is damaged and is skipped: {error}", file=sys.stderr)
            damaged.append(f"{folder.name}: {error}")
            continue
        check_same_run(folder, meta, config)
        first = {n.removeprefix("first."): a for n, a in moments.items() if n.startswith("first.")}
        second = {n.removeprefix("second."): a for n, a in moments.items() if n.startswith("second.")}
        return Checkpoint(meta["step"], weights, first, second)
    if damaged:
        files = "; ".join(damaged)
        raise ValueError(f"--resume: {out}: every checkpoint is damaged: {files}; restore one or pass another --out")
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
        if (folder / META).exists():
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


def _write_files(folder: Path, state: Checkpoint, config: Mapping[str, Any]) -> None:
    """The three files, flushed to disk."""
    moments = {f"first.{n}": a for n, a in state.first.items()} | {f"second.{n}": a for n, a in state.second.items()}
    meta, hashes = {"step": state.step, "config": config}, {}
    for name, arrays in zip(FILES, (state.weights, moments), strict=True):
        hashes[name] = write_file(folder / name, save({n: np.ascontiguousarray(a) for n, a in arrays.items()}))
    meta["sha256"] = hashes | {META: _hash_of_meta(meta)}
    write_file(folder / META, _text_of(meta))
    _sync_folder(folder)


def _read_meta(folder: Path) -> dict[str, Any]:
    """Read meta.json and check the SHA-256 of all files. Raises ValueError."""
    meta = _read_json(folder)
    hashes = _meta_hashes(meta)
    if not isinstance(meta.get("config"), dict):
        raise ValueError("meta.json has no config")
    if meta.get("step") != _step(folder):
        raise ValueError(f"meta.json has step {meta.get('step')}")
    if hashes.get(META) != _hash_of_meta(meta):
        raise ValueError(
            f"meta.json has SHA-256 {hashes.get(META)} of step and config, which are {_hash_of_meta(meta)}"
        )
    if (folder / META).read_bytes() != _text_of(meta):
        raise ValueError("meta.json has other bytes than were written")
    for name in FILES:
        _check_hash(folder / name, hashes)
    return meta


def _text_of(meta: Mapping[str, Any]) -> bytes:
    return json.dumps(meta, indent=2).encode()


def _hash_of_meta(meta: Mapping[str, Any]) -> str:
    """SHA-256 of step and config."""
    text = json.dumps([meta["step"], meta["config"]], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _read_json(folder: Path) -> dict[str, Any]:
    try:
        meta = json.loads((folder / META).read_bytes())
    except ValueError as error:
        raise ValueError(f"meta.json is no JSON: {error}") from error
    if not isinstance(meta, dict):
        raise ValueError(f"meta.json holds a {type(meta).__name__}, not an object")
    return meta


def _read_arrays(file: Path) -> Arrays:
    try:
        return load_file(file)
    except SafetensorError as error:
        raise ValueError(f"{file.name}: {error}") from error


def _meta_hashes(meta: Mapping[str, Any]) -> Mapping[str, Any]:
    hashes = meta.get("sha256")
    if not isinstance(hashes, dict):
        raise ValueError("meta.json has no sha256 of the files")
    return hashes


def _check_hash(file: Path, hashes: Mapping[str, Any]) -> None:
    found = hash_of(file)
    if found != hashes.get(file.name):
        raise ValueError(f"{file.name} has SHA-256 {found}, meta.json has {hashes.get(file.name)}")


def hash_of(file: Path) -> str:
    """SHA-256."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def write_file(path: Path, data: bytes) -> str:
    """Write and flush to disk. Returns the SHA-256 of `data`."""
    with _named(path), path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return hashlib.sha256(data).hexdigest()


def _sync_folder(path: Path) -> None:
    """fsync the folder, so that a rename inside it reaches the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with _named(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Errors of an open file do not name it."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
