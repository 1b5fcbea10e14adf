"""The two scripts, started as a user starts them, on a tiny model.

Curves: PyTorch, JAX, one rank, two ranks - the same numbers. A killed run goes on exactly. A checkpoint
of one framework is a start for the other.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from examples.checkpoint import load_checkpoint, load_weights
from examples.config import PRESETS, describe
from examples.runlog import read_log
from examples.weights import initial_weights, weight_shapes

ROOT = Path(__file__).parents[2]
TINY = PRESETS["tiny"]
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node")


def start(framework: str, ep: int, out: Path, *flags: str) -> subprocess.Popen:
    """Start a training the way the scripts' docstrings say, on one file of text."""
    launcher = (*TORCHRUN, str(ep), "-m") if framework == "torch" and ep > 1 else ()
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", *launcher, f"examples.train_{framework}", "--preset", "tiny", "--ep", str(ep)]
    command += ["--out", str(out), "--data", argparse.__file__, *flags]
    return subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen) -> str:
    """Wait for it; returns what it wrote to stderr."""
    return process.communicate(timeout=150)[1]


def train(framework: str, ep: int, out: Path, *flags: str) -> Path:
    process = start(framework, ep, out, *flags)
    error = finish(process)
    assert process.returncode == 0, error
    return out


def losses(out: Path) -> dict[tuple[str, int], float]:
    return {(r["kind"], r["step"]): r["loss"] for r in read_log(out) if r["kind"] != "run"}


def values(out: Path, key: str) -> np.ndarray:
    return np.array([r[key] for r in read_log(out) if r["kind"] == "train"])


def assert_curves_agree(ours: Path, theirs: Path) -> None:
    """Rounding grows from step to step, so the first ten steps are held to more than the rest."""
    a, b = losses(ours), losses(theirs)
    assert a.keys() == b.keys()
    np.testing.assert_allclose(list(a.values()), list(b.values()), rtol=5e-3)
    for key, rtol in (("loss", 1e-3), ("grad_norm", 1e-2), ("lr", 0)):
        np.testing.assert_allclose(values(ours, key)[:10], values(theirs, key)[:10], rtol=rtol)


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    """run(framework, ep, precision): the folder of an uninterrupted tiny run; each is made once."""

    @cache
    def make(framework: str, ep: int, precision: str = "mxfp8") -> Path:
        out = tmp_path_factory.mktemp("runs") / f"{framework}-{ep}-{precision}"
        return train(framework, ep, out, "--precision", precision)

    return make


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_two_ranks_train_like_one(run, framework):
    one, two = run(framework, 1), run(framework, 2)
    assert len(losses(one)) == TINY.steps + TINY.steps // TINY.eval_every + 1
    assert_curves_agree(two, one)
    assert losses(one)["train", TINY.steps - 1] < losses(one)["train", 0] - 0.5


@pytest.mark.parametrize("precision", ["bf16", "mxfp8"])
def test_torch_trains_like_jax(run, precision):
    torch, jax = run("torch", 2, precision), run("jax", 2, precision)
    assert_curves_agree(torch, jax)
    # The first batch meets equal weights: what remains is the rounding of the experts' bf16.
    assert values(torch, "loss")[0] == pytest.approx(values(jax, "loss")[0], rel=1e-4)


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_mxfp8_trains_like_bf16_but_is_not_bf16(run, framework):
    bf16, mxfp8 = (list(losses(run(framework, 2, p)).values()) for p in ("bf16", "mxfp8"))
    np.testing.assert_allclose(mxfp8, bf16, rtol=1e-2)
    assert mxfp8 != bf16


def test_the_other_framework_updates_like_this_one(run):
    """After `steps` updates the weights themselves agree, and so do AdamW's moments."""
    states = {}
    for framework in ("torch", "jax"):
        folder = run(framework, 2, "bf16")
        (header,) = (r for r in read_log(folder) if r["kind"] == "run")
        config = {k: v for k, v in header.items() if k not in ("kind", "framework", "ep")}
        assert config["train_bytes"] + config["held_out_bytes"] == Path(argparse.__file__).stat().st_size
        states[framework] = load_checkpoint(folder, config)
    start = initial_weights(TINY)
    for name, before in start.items():
        ours, theirs = (states[f].weights[name] for f in ("torch", "jax"))
        moved = np.linalg.norm(theirs - before)
        assert np.linalg.norm(ours - theirs) < 0.1 * moved, name


@pytest.mark.parametrize(("writer", "reader"), [("torch", "jax"), ("jax", "torch")])
def test_a_checkpoint_is_a_start_for_the_other_framework(run, tmp_path, writer, reader):
    checkpoint = run(writer, 2) / f"step-{TINY.steps:06d}"
    assert {n: a.shape for n, a in load_weights(checkpoint, weight_shapes(TINY)).items()} == weight_shapes(TINY)
    out = train(reader, 1, tmp_path / "out", "--init-from", str(checkpoint), "--steps", "0")
    assert losses(out)["eval", 0] == pytest.approx(losses(run(writer, 2))["eval", TINY.steps], rel=1e-4)


@pytest.mark.parametrize(("writer", "reader"), [("torch", "jax"), ("jax", "torch")])
def test_a_run_goes_on_in_the_other_framework_on_one_rank(run, tmp_path, writer, reader):
    """Moments, step and experts are stored in a way that neither framework nor number of ranks shows in."""
    whole = run(writer, 2)
    out = tmp_path / "out"
    shutil.copytree(whole, out)
    shutil.rmtree(out / f"step-{TINY.steps:06d}")
    train(reader, 1, out, "--resume")
    header = read_log(out)[0]
    assert (header["framework"], header["ep"]) == (reader, 1)
    assert_curves_agree(out, whole)
    after = TINY.steps - TINY.eval_every
    np.testing.assert_allclose(values(out, "loss")[after:][:5], values(whole, "loss")[after:][:5], rtol=1e-3)
    assert (values(out, "loss")[after:] != values(whole, "loss")[after:]).any()


def kill_in_the_middle(framework: str, ep: int, out: Path) -> None:
    """Start a run and SIGKILL it - a rank of it, under torchrun - once it has a checkpoint to go on from."""
    process = start(framework, ep, out)
    deadline = time.monotonic() + 100
    while not list(out.glob("step-*[0-9]")):
        assert process.poll() is None, finish(process)
        assert time.monotonic() < deadline, "no checkpoint"
        time.sleep(0.005)
    victim = process.pid
    if ep > 1 and framework == "torch":
        victim = int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0])
    os.kill(victim, signal.SIGKILL)
    finish(process)
    assert process.returncode != 0
    assert ("eval", TINY.steps) not in losses(out), "it was done before the kill"


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_a_killed_run_goes_on_exactly(run, tmp_path, framework):
    whole, killed = run(framework, 2), tmp_path / "killed"
    kill_in_the_middle(framework, 2, killed)
    train(framework, 2, killed, "--resume")
    assert losses(killed) == losses(whole)
    for name in ("weights.safetensors", "optimizer.safetensors"):
        checkpoint = f"step-{TINY.steps:06d}"
        assert (killed / checkpoint / name).read_bytes() == (whole / checkpoint / name).read_bytes()


@pytest.mark.parametrize(
    ("framework", "flags", "message"),
    [
        ("torch", ("--ep", "2"), "--ep: got 2 with 1 process"),
        ("jax", ("--data", "nowhere"), "--data: got 'nowhere', which does not exist"),
        ("jax", ("--init-from", "nowhere"), "--init-from: got 'nowhere'; allowed: a checkpoint folder"),
    ],
)
def test_bad_flags_are_named(tmp_path, framework, flags, message):
    process = start(framework, 1, tmp_path / "out", *flags)
    error = finish(process)
    assert process.returncode != 0
    assert message in error
    assert "Traceback" not in error


def test_a_folder_with_a_run_is_not_overwritten(run):
    process = start("jax", 2, run("jax", 2))
    error = finish(process)
    assert process.returncode != 0
    assert "already holds a run; pass --resume" in error
    assert describe(TINY, precision="mxfp8").items() <= read_log(run("jax", 2))[0].items()
