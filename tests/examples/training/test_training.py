"""Both training scripts on a tiny model: what is killed and several processes of JAX from the command line, ranks of
torch in forks, the rest here.

Their curves agree: PyTorch and JAX, one rank and two. A killed run resumes exactly, and a run in two parts is the run
in one. JAX trains in two processes as in one. Each framework starts and resumes from the other's checkpoints.
"""

import argparse
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest

from examples.training import loop, train_jax, train_torch
from examples.training.checkpoint import load_checkpoint, load_weights
from examples.training.config import PRESETS, describe
from examples.training.flags import parse_args, parser
from examples.training.runlog import read_log
from examples.training.weights import initial_weights, weight_shapes

from .. import launched

ROOT = Path(__file__).parents[3]
TINY = PRESETS["tiny"]
PROGRAMS = TemporaryDirectory()
"""JAX keeps compiled programs here, so that runs of the same model compile once."""
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node")
TRAINERS = {"torch": train_torch.Trainer, "jax": train_jax.Trainer}
RECIPE = "mxfp8_wgrad_with_hp"


def start(framework: str, ep: int, out: Path, *flags: str) -> subprocess.Popen:
    """Start a training with the command of the script's docstring, on one text file, on the CPU."""
    launcher = (*TORCHRUN, str(ep), "-m") if framework == "torch" and ep > 1 else ()
    caching = {"JAX_COMPILATION_CACHE_DIR": PROGRAMS.name, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    environment = caching | os.environ | {"OMP_NUM_THREADS": "1"}
    environment["XLA_FLAGS"] = " ".join(f for f in environment["XLA_FLAGS"].split() if "device_count" not in f)
    command = [sys.executable, "-m", *launcher, f"examples.training.train_{framework}", *arguments(ep, out, *flags)]
    return subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)


def arguments(ep: int, out: Path, *flags: str) -> list[str]:
    sizes = ("--preset", "tiny", "--ep", str(ep), "--data", argparse.__file__, "--device", "cpu")
    return [*sizes, "--out", str(out), *flags]


def finish(process: subprocess.Popen) -> str:
    """Wait for the process. Returns its stderr."""
    return process.communicate(timeout=150)[1]


def train(framework: str, ep: int, out: Path, *flags: str) -> Path:
    """A run in processes of its own."""
    process = start(framework, ep, out, *flags)
    error = finish(process)
    assert process.returncode == 0, error
    return out


def train_here(framework: str, ep: int, out: Path, *flags: str) -> Path:
    """A run in this process, which has imported the frameworks. It has four CPU devices of JAX."""
    args, config = parse_args(parser("here"), arguments(ep, out, *flags))
    loop.train(framework, args, config, TRAINERS[framework])
    return out


def losses(out: Path) -> dict[tuple[str, int], float]:
    return {(r["kind"], r["step"]): r["loss"] for r in read_log(out) if r["kind"] != "run"}


def values(out: Path, key: str) -> np.ndarray:
    return np.array([r[key] for r in read_log(out) if r["kind"] == "train"])


def assert_curves_agree(left: Path, right: Path) -> None:
    """The first ten steps have a tighter tolerance, because rounding errors grow with the steps."""
    a, b = losses(left), losses(right)
    assert a.keys() == b.keys()
    np.testing.assert_allclose(list(a.values()), list(b.values()), rtol=5e-3)
    for key, rtol in (("loss", 1e-3), ("grad_norm", 1e-2), ("lr", 0)):
        np.testing.assert_allclose(values(left, key)[:10], values(right, key)[:10], rtol=rtol)


@pytest.fixture(scope="module")
def run(tmp_path_factory, start_ranks):
    """run(framework, ep, recipe) returns the folder of an uninterrupted tiny run. Each run happens once."""

    @cache
    def make(framework: str, ep: int, recipe: str) -> Path:
        out = tmp_path_factory.mktemp("runs") / f"{framework}-{ep}-{recipe}"
        if framework == "jax" or ep == 1:
            return train_here(framework, ep, out, "--recipe", recipe)
        ranks = start_ranks(launched, ep, backend=None)
        launched.launch(ranks, train_torch.__name__, [*arguments(ep, out), "--recipe", recipe])
        return out

    return lambda framework, ep, recipe=RECIPE: make(framework, ep, recipe)


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_two_ranks_train_like_one(run, framework):
    one, two = run(framework, 1), run(framework, 2)
    assert len(losses(one)) == TINY.steps + TINY.steps // TINY.eval_every + 1
    assert_curves_agree(two, one)
    assert losses(one)["train", TINY.steps - 1] < losses(one)["train", 0] - 0.5


# In bf16 PyTorch has one rank, which starts one process instead of three.
@pytest.mark.parametrize(("recipe", "ranks"), [("bf16", 1), (RECIPE, 2)])
def test_torch_trains_like_jax(run, recipe, ranks):
    torch, jax = run("torch", ranks, recipe), run("jax", 2, recipe)
    assert_curves_agree(torch, jax)
    # Weights are equal at step 0, so the first losses differ by the bf16 rounding of the experts alone.
    assert values(torch, "loss")[0] == pytest.approx(values(jax, "loss")[0], rel=1e-4)


@pytest.mark.parametrize(("framework", "ranks"), [("torch", 1), ("jax", 2)])
def test_mxfp8_trains_like_bf16_but_is_not_bf16(run, framework, ranks):
    bf16, mxfp8 = (list(losses(run(framework, ranks, p)).values()) for p in ("bf16", RECIPE))
    np.testing.assert_allclose(mxfp8, bf16, rtol=1e-2)
    assert mxfp8 != bf16


def test_torch_and_jax_reach_the_same_weights(run):
    """The final weights differ by less than a tenth of their distance from the initial weights."""
    states = {}
    for framework, ranks in (("torch", 1), ("jax", 2)):
        folder = run(framework, ranks, "bf16")
        (header,) = (r for r in read_log(folder) if r["kind"] == "run")
        config = {k: v for k, v in header.items() if k not in ("kind", "framework", "ep", "device")}
        assert config["train_bytes"] + config["held_out_bytes"] == Path(argparse.__file__).stat().st_size
        states[framework] = load_checkpoint(folder, config)
    start = initial_weights(TINY)
    for name, before in start.items():
        in_torch, in_jax = (states[f].weights[name] for f in ("torch", "jax"))
        distance = np.linalg.norm(in_jax - before)
        assert np.linalg.norm(in_torch - in_jax) < 0.1 * distance, name


@pytest.mark.parametrize(("writer", "reader"), [("torch", "jax"), ("jax", "torch")])
def test_a_run_starts_from_the_other_frameworks_checkpoint(run, tmp_path, writer, reader):
    checkpoint = run(writer, 2) / f"step-{TINY.steps:06d}"
    assert {n: a.shape for n, a in load_weights(checkpoint, weight_shapes(TINY)).items()} == weight_shapes(TINY)
    out = train_here(reader, 1, tmp_path / "out", "--init-from", str(checkpoint), "--steps", "0")
    assert losses(out)["eval", 0] == pytest.approx(losses(run(writer, 2))["eval", TINY.steps], rel=1e-4)


@pytest.mark.parametrize(("writer", "reader"), [("torch", "jax"), ("jax", "torch")])
def test_a_run_resumes_in_the_other_framework_on_one_rank(run, tmp_path, writer, reader):
    """A checkpoint depends neither on the framework nor on the number of ranks."""
    uninterrupted = run(writer, 2)
    out = tmp_path / "out"
    shutil.copytree(uninterrupted, out)
    shutil.rmtree(out / f"step-{TINY.steps:06d}")
    train_here(reader, 1, out, "--resume")
    header = read_log(out)[0]
    assert (header["framework"], header["ep"]) == (reader, 1)
    assert_curves_agree(out, uninterrupted)
    after = TINY.steps - TINY.eval_every
    np.testing.assert_allclose(values(out, "loss")[after:][:5], values(uninterrupted, "loss")[after:][:5], rtol=1e-3)
    assert (values(out, "loss")[after:] != values(uninterrupted, "loss")[after:]).any()


def assert_same_run(left: Path, right: Path) -> None:
    """The same training losses and, at the end, the same weights and moments, to the byte."""
    assert values(left, "loss").tolist() == values(right, "loss").tolist()
    checkpoint = f"step-{TINY.steps:06d}"
    for name in ("weights.safetensors", "optimizer.safetensors"):
        assert (left / checkpoint / name).read_bytes() == (right / checkpoint / name).read_bytes()


def kill_in_the_middle(framework: str, ep: int, out: Path) -> None:
    """Start a run and send SIGKILL after its first checkpoint: to one rank under torchrun, else to the process. Before
    that another run is refused the folder."""
    process = start(framework, ep, out)
    deadline = time.monotonic() + 100
    while not list(out.glob("step-*[0-9]")):
        assert process.poll() is None, finish(process)
        assert time.monotonic() < deadline, "no checkpoint within 100 s"
        time.sleep(0.005)
    with pytest.raises(SystemExit, match=r"--out: .* is in use by the run of process \d+; allowed: another folder"):
        train_torch.main([*arguments(1, out), "--resume"])
    victim = process.pid
    if ep > 1 and framework == "torch":
        victim = int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0])
    os.kill(victim, signal.SIGKILL)
    finish(process)
    assert process.returncode != 0
    assert ("eval", TINY.steps) not in losses(out), "the run finished before the kill"


@pytest.mark.parametrize("framework", [pytest.param("torch", marks=pytest.mark.slow), "jax"])
def test_a_killed_run_resumes_exactly(run, tmp_path, framework):
    uninterrupted, killed = run(framework, 2), tmp_path / "killed"
    kill_in_the_middle(framework, 2, killed)
    (train_here if framework == "jax" else train)(framework, 2, killed, "--resume")
    assert_same_run(killed, uninterrupted)


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_a_run_in_two_parts_is_the_run_in_one(run, tmp_path, framework):
    half = str(TINY.steps // 2)
    of_half = ("--steps", half, "--schedule-steps", str(TINY.steps), "--eval-every", half)
    train_here(framework, 1, tmp_path / "parts", *of_half)
    train_here(framework, 1, tmp_path / "parts", "--resume")
    assert_same_run(tmp_path / "parts", run(framework, 1))


def test_jax_trains_in_two_processes_as_in_one(run, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    flags = ("--recipe", "bf16", "--coordinator", coordinator, "--num-processes", "2", "--process-id")
    processes = [start("jax", 2, tmp_path / "out", *flags, str(i)) for i in range(2)]
    errors = [finish(process) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], errors
    assert_same_run(tmp_path / "out", run("jax", 2, "bf16"))


@pytest.mark.parametrize(
    ("script", "flags", "message"),
    [
        (
            train_torch,
            ("--device", "cpu", "--ep", "2"),
            "--ep: got 2 with 1 process(es); allowed: one process per rank",
        ),
        (train_torch, ("--device", "gpu"), "--device: got gpu for process 0 of this machine, which has 0 GPU(s)"),
        (train_jax, ("--ep", "2", "--num-processes", "2"), "--coordinator: got None with --num-processes 2"),
        (train_jax, ("--process-id", "1"), "--process-id: got 1; allowed: 0 to 0"),
        (train_jax, ("--num-processes", "3"), "--num-processes: got 3; allowed: divisors of 1 ranks, --dp x --ep"),
        (train_jax, ("--local-devices", "0"), "--local-devices: got [0] with one process"),
        (train_torch, ("--device", "cpu", "--data", "nowhere"), "--data: got 'nowhere', which does not exist"),
        (
            train_torch,
            ("--device", "cpu", "--data", argparse.__file__, "--init-from", "nowhere"),
            "--init-from: got 'nowhere'; allowed: a checkpoint folder",
        ),
    ],
)
def test_an_error_names_the_bad_flag(tmp_path, capsys, script, flags, message):
    with pytest.raises(SystemExit) as exit:
        script.main(["--preset", "tiny", "--out", str(tmp_path / "out"), *flags])
    # argparse prints its message and exits with 2; Python prints a message that is the exit's code.
    assert message in (capsys.readouterr().err if exit.value.code == 2 else exit.value.code)


def test_a_folder_with_a_run_is_not_overwritten(run, capsys):
    with pytest.raises(SystemExit, match="2"):
        train_jax.main(["--preset", "tiny", "--ep", "2", "--out", str(run("jax", 2))])
    assert "already holds a run; pass --resume" in capsys.readouterr().err
    assert describe(TINY, recipe=RECIPE).items() <= read_log(run("jax", 2))[0].items()


def test_torch_logs_the_balance_of_all_ranks(run):
    one, two = (values(run("torch", ep), "imbalance") for ep in (1, 2))
    assert (one >= 1).all()
    np.testing.assert_allclose(one[:3], two[:3], rtol=0.05)
    assert (values(run("torch", 2), "dead_experts") >= 0).all()
