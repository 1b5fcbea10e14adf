"""`python -m benchmarks train_step`: where the time of a training step goes, in MXFP8 and bf16.

The model of the example, in PyTorch, its experts sharded over two ranks.

step --torch.profiler--> self time of every op --KINDS--> matmul | attention | quantize | SwiGLU | permute | all-to-all
                         wall time less these ---------> rest (optimizer, norms, casts, router, Python)
"""

import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from mxep import cpp_bindings
from torch.multiprocessing.spawn import spawn

from examples.checkpoint import Checkpoint
from examples.config import PRESETS, Config
from examples.data import Text
from examples.throughput import weights_per_token
from examples.train_torch import Trainer
from examples.weights import initial_weights

from .figures.results import Line
from .figures.timing import summarize

NAMES = ("train_step",)
RANKS, PRESET = 2, "small"
RECIPES = {"mxfp8": "mxfp8_wgrad_with_hp", "bf16": "bf16"}
WARM_UP, STEPS, PROFILED = 3, 21, 8
MIN_SQNR_DB = 28.0  # logits of fresh weights, MXFP8 against bf16: 31.7 dB measured

# An op belongs to the first kind with a matching prefix; its children are counted separately.
KINDS = {
    "matmul": ("aten::mm", "aten::addmm", "aten::bmm", "mxep::grouped_"),
    "attention": ("aten::_scaled_dot_product",),
    "quantize": ("cpp::quantize", "cpp::dequantize", "mxep::quantize", "mxep::dequantize"),
    "SwiGLU": ("cpp::swiglu", "mxep::swiglu"),
    "permute": tuple(
        f"{where}::{op}" for where in ("cpp", "mxep") for op in ("permute", "sort", "row_map", "slot_map", "combine")
    ),
    "all-to-all": ("_c10d_functional::all_to_all", "_c10d_functional::wait_tensor"),
}


@contextmanager
def named_cpp_ops() -> Iterator[None]:
    """Within the block the profiler records every C++ op as `cpp::<name>`, inside the CPU's grouped GEMM too."""
    run = cpp_bindings.run

    def named(name: str, *args: Any) -> None:
        with torch.profiler.record_function(f"cpp::{name}"):
            run(name, *args)

    cpp_bindings.run = named
    try:
        yield
    finally:
        cpp_bindings.run = run


def profile(step: Callable[[], object]) -> dict[str, float]:
    """Share of each kind in the wall time of `PROFILED` steps; the shares sum to 1."""
    with named_cpp_ops(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        start = time.perf_counter()
        for _ in range(PROFILED):
            step()
        wall_us = (time.perf_counter() - start) * 1e6
    shares = dict.fromkeys(KINDS, 0.0)
    for event in profiler.key_averages():
        kind = next((kind for kind, prefixes in KINDS.items() if event.key.startswith(prefixes)), None)
        if kind:
            shares[kind] += event.self_cpu_time_total / wall_us
    return shares | {"rest": 1 - sum(shares.values())}


def sqnr_db(got: torch.Tensor, expected: torch.Tensor) -> float:
    noise = (got.double() - expected.double()).square().sum()
    return float(10 * torch.log10(expected.double().square().sum() / noise))


def _rank(rank: int, port: int, threads: int, queue: Any) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    torch.set_num_threads(threads)
    dist.init_process_group("gloo")
    config = PRESETS[PRESET]
    weights = initial_weights(config)
    zeros = {name: np.zeros_like(array) for name, array in weights.items()}
    start = Checkpoint(0, weights, zeros, zeros)
    trainers = {name: Trainer(config, recipe, RANKS, start, "cpu") for name, recipe in RECIPES.items()}
    batch = Text.load(None, config).batch(0)
    steps = {
        name: lambda trainer=trainer: trainer.step(config.warmup_steps, batch) for name, trainer in trainers.items()
    }

    with torch.no_grad():
        tokens = trainers["bf16"].tokens(batch)[:, :-1]
        error = sqnr_db(*(trainers[name].model(tokens)[0] for name in RECIPES))
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(WARM_UP + STEPS):
        for name, step in steps.items():
            begin = time.perf_counter()
            step()
            times[name].append(time.perf_counter() - begin)
    samples = {name: summarize(seconds[WARM_UP:]) for name, seconds in times.items()}
    shares = {name: profile(step) for name, step in steps.items()}
    if rank == 0:
        queue.put((samples, shares, error))
    dist.barrier()  # a rank that exits while another still sends to it aborts
    os._exit(0)  # Gloo's threads may still drop tensors, which aborts while Python ends


def flops(config: Config) -> int:
    """6 per token and weight: 2 forward, 4 backward. The products of attention scores are not counted."""
    return 6 * config.batch_size * config.seq_len * weights_per_token(config)


def lines(only: Sequence[str]) -> Iterator[Line]:
    """Time the step in both precisions, print both profiles, and return the MXFP8 line with bf16 as its peer."""
    if only and "train_step" not in only:
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    threads = max(1, cpp_bindings.num_threads() // RANKS)
    queue = get_context("spawn").SimpleQueue()
    spawn(_rank, args=(port, threads, queue), nprocs=RANKS)
    samples, shares, error = queue.get()
    if error < MIN_SQNR_DB:
        raise AssertionError(
            f"train_step: logits of MXFP8 are {error:.1f} dB from bf16; expected {MIN_SQNR_DB} or more"
        )

    print(f"\nshare of a training step, {RANKS} ranks, {threads} thread(s) each, preset {PRESET}")
    for precision, kinds in shares.items():
        print(f"  {precision:6}" + "".join(f"  {kind} {share:6.1%}" for kind, share in kinds.items()))
    moved = {name: kinds["quantize"] + kinds["permute"] for name, kinds in shares.items()}
    print("  quantize and permute together: " + ", ".join(f"{name} {share:.1%}" for name, share in moved.items()))

    ours, peer = (samples[name] for name in RECIPES)
    config = PRESETS[PRESET]
    yield Line(
        op="train_step",
        frontend="torch",
        case={"preset": PRESET, "ranks": RANKS, "recipe": RECIPES["mxfp8"], "threads": threads},
        us=ours.us,
        spread=ours.spread,
        n=ours.n,
        nbytes=0,
        flops=flops(config),
        of_roof=None,
        roof=None,
        peer="bf16_pipeline",
        peer_us=peer.us,
        ratio=round(peer.us / ours.us, 2),
        peak_nbytes=None,
        error={"grade": "sqnr_db", "sqnr_db": round(error, 1)},
        shares={kind: round(share, 3) for kind, share in shares["mxfp8"].items()},
    )
