"""`torchrun --nproc-per-node 2 -m benchmarks ep`: expert parallelism of one product on GPUs of one host, forward and
backward, against the same pipeline in plain bf16 torch; over Gloo at a small size where there is no GPU.

    bytes of every overlapped run = bytes of the run in turn; SQNR against bf16
    rounds: bf16 | bf16 wire | in turn | each transport | stages alone       median of the slowest rank

e = max(wire, products) / measured, for the forward and for the backward; wire, products and the whole are timed in the
same rounds.
"""

import gc
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from mxep.core_kernels.launch import fail
from mxep.core_kernels.recipe import Recipe
from mxep.torch_frontend.copy_engines import CopyEngines
from mxep.torch_frontend.transport import Collectives, Transport

from .cases.expert_parallel import H200, TINY, EPShape, Inputs, Stages, candidates
from .figures.device_timing import peak_nbytes
from .figures.results import Line
from .figures.timing import Sample, summarize

RECIPES = ("mxfp8", "mxfp8_wgrad_with_hp")
TRANSPORTS = ("collectives", "copy engines")
NAMES = (*RECIPES, *TRANSPORTS)
MIN_SQNR_DB = 21.0
ROUNDS = 10
TIMEOUT = timedelta(seconds=90)


def lines(only: Sequence[str], shapes: Sequence[EPShape] | None = None, rounds: int = ROUNDS) -> Iterator[Line]:
    """Lines of rank 0; nothing on the other ranks. only: names of recipes and of transports."""
    device = _device()
    if not dist.is_initialized():
        if "RANK" not in os.environ:
            fail(
                RuntimeError, "ep", "RANK", "nothing", "allowed: a run by torchrun --nproc-per-node N -m benchmarks ep"
            )
        if device.type == "cuda":
            dist.init_process_group("nccl", device_id=device, timeout=TIMEOUT)
        else:
            dist.init_process_group("gloo", timeout=TIMEOUT)
    transports = _transports(device)
    if unknown := set(only) - {*RECIPES, *transports}:
        allowed = f"allowed: {', '.join((*RECIPES, *transports))}"
        fail(ValueError, "ep", "only", ", ".join(sorted(unknown)), allowed)
    transports = {name: t for name, t in transports.items() if name in only or not set(only) & set(transports)}
    for shape in shapes or (H200 if device.type == "cuda" else TINY):
        for recipe in [name for name in RECIPES if name in only or not set(only) & set(RECIPES)]:
            found = _measured(Inputs.of(shape, device), shape, Recipe.parse(recipe), transports, rounds)
            if dist.get_rank() == 0:
                yield from found
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()


def _device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def _transports(device: torch.device) -> dict[str, Transport]:
    group = dist.group.WORLD
    assert group is not None
    engines: dict[str, Transport] = {"copy engines": CopyEngines(group)} if device.type == "cuda" else {}
    return {"collectives": Collectives(group), **engines}


def _measured(
    inputs: Inputs, shape: EPShape, recipe: Recipe, transports: Mapping[str, Transport], rounds: int
) -> list[Line]:
    forwards, stages = candidates(inputs, recipe, transports), Stages(inputs, recipe)
    sqnr = _check(inputs, forwards, transports)
    saved = stages.forward()
    runs: dict[str, Callable[[], object]] = {"products forward": stages.forward}
    runs["products backward"] = lambda: stages.backward(saved)
    for name, transport in transports.items():
        runs[f"{name} wire forward"] = lambda t=transport: stages.wire(t, False)
        runs[f"{name} wire backward"] = lambda t=transport: stages.wire(t, True)
    for name, forward in forwards.items():
        runs[f"{name} forward"] = forward
        runs[f"{name} both"] = lambda f=forward: inputs.backward(f)
    times = _times(runs, inputs.rows.device, rounds)
    peaks = {}
    for name, forward in forwards.items():
        inputs.rows.grad = inputs.w.grad = None  # memory of the run before would hide a part of the peak
        peaks[name] = peak_nbytes(lambda f=forward: inputs.backward(f))
    if dist.get_rank() == 0:
        _print_stages(shape, recipe, times, transports)
    return [
        _line(shape, recipe, name, step, times, peaks[name], sqnr)
        for name in forwards
        if name != "bf16"
        for step in ("forward", "both")
    ]


def _check(inputs: Inputs, forwards: Mapping[str, Callable[[], Any]], transports: Mapping[str, Transport]) -> float:
    """Bytes of the overlapped runs against the run in turn; the least SQNR of y and of the gradients against bf16."""
    want = [t.detach().clone() for t in inputs.backward(forwards["in turn"])]
    for name in transports:
        for _ in range(2):  # the second call reuses buffers
            got = inputs.backward(forwards[name])
            rows = [(one != other).flatten(1).any(1).sum() for one, other in zip(got, want, strict=True)]
            wrong = torch.stack(rows)
            dist.all_reduce(wrong)  # every rank raises: the others would wait for one that left
            if wrong.any():
                raise AssertionError(
                    f"ep: {name}: rows that differ from the run in turn: y, drows, dw {wrong.tolist()}"
                )
    reference = inputs.backward(forwards["bf16"])
    noise = [(10 * torch.log10(b.float().square().sum() / (a.float() - b.float()).square().sum())).item()
             for a, b in zip(want, reference, strict=True)]  # fmt: skip
    least = torch.tensor(min(noise), device=inputs.rows.device)
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    assert least >= MIN_SQNR_DB, f"ep: {noise} dB from bf16; expected {MIN_SQNR_DB} or more"
    return round(least.item(), 1)


def _times(runs: Mapping[str, Callable[[], object]], device: torch.device, rounds: int) -> dict[str, Sample]:
    """Seconds of each run on the slowest rank, every run once per round; three rounds before warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for round_ in range(3 + rounds):
        for name, run in list(runs.items())[:: -1 if round_ % 2 else 1]:
            seconds[name].append(_seconds(run, device))
    table = torch.tensor([times[3:] for times in seconds.values()], device=device)
    dist.all_reduce(table, op=dist.ReduceOp.MAX)
    return {name: summarize(row) for name, row in zip(runs, table.tolist(), strict=True)}


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    dist.barrier()
    if device.type == "cpu":
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3


def _print_stages(
    shape: EPShape, recipe: Recipe, times: Mapping[str, Sample], transports: Mapping[str, Transport]
) -> None:
    ms = {name: sample.us / 1e3 for name, sample in times.items()}
    print(f"\nep: {tuple(shape)}, {recipe.name}, {dist.get_world_size()} ranks; ms, forward / backward")
    for name in ("bf16", "bf16 wire", "in turn", *transports):
        forward, backward = ms[f"{name} forward"], ms[f"{name} both"] - ms[f"{name} forward"]
        of_bf16 = ms["bf16 both"] / ms[f"{name} both"]
        text = f"{name:14} {forward:8.3f} / {backward:8.3f}   together {ms[f'{name} both']:8.3f}   {of_bf16:.2f}x bf16"
        if name in transports:
            for step, whole in (("forward", forward), ("backward", backward)):
                wire, products = ms[f"{name} wire {step}"], ms[f"products {step}"]
                text += f"   {step}: wire {wire:.3f} products {products:.3f} e {max(wire, products) / whole:.2f}"
        print(text, flush=True)


def _line(
    shape: EPShape, recipe: Recipe, name: str, step: str, times: Mapping[str, Sample], peak: int | None, sqnr: float
) -> Line:
    ours, theirs = times[f"{name} {step}"], times[f"bf16 {step}"]
    m, k, n, _ = shape
    return Line(
        op="ep_fwd" if step == "forward" else "ep_fwd_bwd",
        frontend="torch",
        case={**shape._asdict(), "ranks": dist.get_world_size(), "recipe": recipe.name, "how": name},
        us=ours.us,
        spread=ours.spread,
        n=ours.n,
        nbytes=0,
        flops=2 * m * k * n * (1 if step == "forward" else 3),
        of_roof=None,
        roof=None,
        peer="bf16",
        peer_us=theirs.us,
        ratio=round(theirs.us / ours.us, 3),
        peak_nbytes=peak,
        error={"grade": "sqnr_db", "sqnr_db": sqnr},
    )
