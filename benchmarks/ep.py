"""`torchrun --nproc-per-node 2 -m benchmarks ep`: expert parallelism on GPUs of one host, forward and backward, against
plain torch with bf16 all-to-alls; over Gloo at a small size where there is no GPU.

    product   dispatch, one grouped product, combine       cases/expert_parallel.py
    layer     router, dispatch, experts, combine           cases/ep_layer.py

    bytes of every run over a transport = bytes of the run without one; SQNR of result and gradients against bf16
    back-to-back steps: bf16 | bf16 wire | no transport | deduplicated | peer memory    median of the slowest rank
    peer memory: one round, also with the forward, and with the step, in a CUDA graph
    peer memory, in rounds: the default, as many rounds as a routing needs
"""

import gc
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from mxep.core_kernels.launch import fail
from mxep.core_kernels.policy.recipe import Recipe
from mxep.torch_frontend.overlap.peer_memory import PeerMemory

from .cases.chosen_experts import ROUTINGS
from .cases.ep import ep_layer, expert_parallel
from .cases.ep.ep_work import IN_ROUNDS, IN_TURN, ONCE, PEER, SUMMED, Work, check, held_nbytes
from .cases.ep.expert_parallel import EPShape
from .cases.shapes import MoELayer
from .clocks import ranks
from .clocks.device_timing import peak_nbytes
from .clocks.timing import Sample
from .figures.results import Line

KINDS = {"product": expert_parallel, "layer": ep_layer}
RECIPES = ("mxfp8", "mxfp8_wgrad_with_hp")
OVER_PEERS, IN_A_GRAPH = "peer memory", "peer memory, in a graph"
PEERS = (OVER_PEERS, IN_ROUNDS)
OVER = (*PEERS, ONCE, SUMMED)
Shape = EPShape | MoELayer


def size_of(shape: Shape) -> str:
    """For example "7168/2048": dim and hidden dim."""
    return f"{shape.dim}/{shape[2]}"


NAMES = (*KINDS, *RECIPES, *OVER,
         *dict.fromkeys(size_of(s) for kind in KINDS.values() for s in (*kind.H200, *kind.TINY)))  # fmt: skip
SLACK = 1.25
"""Capacity of peer memory, relative to the rows of balanced ranks; in one round with another routing it is all rows."""
TIMEOUT = timedelta(seconds=90)
BOTH = "both"


def lines(only: Sequence[str], routing: str = "balanced") -> Iterator[Line]:
    """Lines of rank 0; nothing on the other ranks.

    only: names of kinds, recipes, sizes, of peer memory or deduplications; of a sort that is not named all. routing: of
    ROUTINGS, for all candidates.
    """
    device = rank_device()
    join("ep", device)
    ways = tuple(name for name in OVER if device.type == "cuda" or name not in PEERS)
    sizes = list(dict.fromkeys(size_of(s) for kind in KINDS.values() for s in _shapes(kind, device)))
    known = (*KINDS, *RECIPES, *ways, *sizes)
    if unknown := set(only) - set(known):
        fail(ValueError, "ep", "only", ", ".join(sorted(unknown)), f"allowed: {', '.join(known)}")
    if routing not in ROUTINGS:
        fail(ValueError, "ep", "routing", routing, f"allowed: {', '.join(ROUTINGS)}")
    over = named(only, ways)
    runs = [(KINDS[kind], shape, Recipe.parse(recipe)) for kind in named(only, KINDS)
            for shape in _shapes(KINDS[kind], device) if size_of(shape) in named(only, sizes)
            for recipe in named(only, RECIPES)]  # fmt: skip
    if not runs:
        fail(ValueError, "ep", "only", ", ".join(only), "allowed: sizes of the kinds that are named; the layer has two")
    for kind, shape, recipe in runs:
        # New memory: it grows with the largest run.
        opened = {name: _open(name, routing) for name in PEERS if name in over}
        work = kind.work(shape, routing, recipe, opened, device)
        left_out = {ONCE, SUMMED} - set(over)
        work = work._replace(forwards={name: f for name, f in work.forwards.items() if name not in left_out})
        found = _measured(work, opened, device)
        if dist.get_rank() == 0:
            yield from found
        del work, opened
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def rank_device() -> torch.device:
    """The device of this process of torchrun, made current."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def join(section: str, device: torch.device) -> None:
    """The process group of torchrun's processes."""
    if dist.is_initialized():
        return
    if "RANK" not in os.environ:
        allowed = f"allowed: a run by torchrun --nproc-per-node N -m benchmarks {section}"
        fail(RuntimeError, section, "RANK", "nothing", allowed)
    if device.type == "cuda":
        dist.init_process_group("nccl", device_id=device, timeout=TIMEOUT)
    else:
        dist.init_process_group("gloo", timeout=TIMEOUT)


def _open(name: str, routing: str) -> PeerMemory:
    rounds = name == IN_ROUNDS
    factor = SLACK if rounds or routing == "balanced" else None
    return PeerMemory(
        dist.group.WORLD, capacity_factor=factor, on_overflow="rounds" if rounds else "nan", timeout=TIMEOUT
    )


def _shapes(kind: object, device: torch.device) -> tuple[Shape, ...]:
    return getattr(kind, "H200" if device.type == "cuda" else "TINY")


def named(only: Sequence[str], sort: Sequence[str] | Mapping[str, object]) -> list[str]:
    """The names of a sort that are among `only`; all, if none is."""
    return [name for name in sort if name in only or not set(only) & set(sort)]


def _measured(work: Work, transports: Mapping[str, PeerMemory], device: torch.device) -> list[Line]:
    sqnr = check(work)
    runs: dict[str, Callable[[], object]] = {}
    for name, forward in work.forwards.items():
        runs[f"{name} forward"] = forward
        runs[f"{name} {BOTH}"] = lambda f=forward: work.step(f)
        if name == OVER_PEERS:
            runs[f"{IN_A_GRAPH} forward"] = _captured(forward)
            runs[f"{IN_A_GRAPH} {BOTH}"] = _captured(lambda f=forward: work.step(f))
    times = ranks.in_a_row(runs, device)
    peaks: dict[str, int | None] = {}
    for name, forward in work.forwards.items():
        peak = peak_nbytes(lambda f=forward: work.step(f))
        held = held_nbytes(transports[name]) if name in transports else 0
        peaks[name] = ranks.largest(None if peak is None else peak + held, device)
    names = [*work.forwards, *([IN_A_GRAPH] if OVER_PEERS in work.forwards else [])]
    if dist.get_rank() == 0:
        _print(work, names, times, peaks)
    return [_line(work, name, step, times, peaks, sqnr)
            for name in names if name != PEER for step in ("forward", BOTH)]  # fmt: skip


def _captured(run: Callable[[], object]) -> Callable[[], object]:
    """The replay of a graph of `run`, which has run before."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        run()
    return graph.replay


def _print(work: Work, names: Sequence[str], times: Mapping[str, Sample], peaks: Mapping[str, int | None]) -> None:
    case = " ".join(f"{key}={value}" for key, value in work.case.items())
    print(f"\n{work.op}: {case}; ms, forward / backward")
    for name in names:
        one, both = (times[f"{name} {step}"].us / 1e3 for step in ("forward", BOTH))
        ratio = times[f"{PEER} {BOTH}"].us / times[f"{name} {BOTH}"].us
        peak = peaks.get(name)
        text = f"{name:14} {one:8.3f} / {both - one:8.3f}   together {both:8.3f}   {ratio:.2f}x bf16"
        print(text + (f"   peak {peak / 2**30:.2f} GiB" if peak is not None else ""))
    print(end="", flush=True)


def _line(
    work: Work,
    name: str,
    step: str,
    times: Mapping[str, Sample],
    peaks: Mapping[str, int | None],
    sqnr: Mapping[str, float],
) -> Line:
    ours, theirs = times[f"{name} {step}"], times[f"{PEER} {step}"]
    return Line(
        op=f"{work.op}_fwd" if step == "forward" else f"{work.op}_fwd_bwd",
        frontend="torch",
        case={**work.case, "how": name},
        us=ours.us,
        spread=ours.spread,
        n=ours.n,
        nbytes=0,
        flops=work.flops[step == BOTH],
        of_roof=None,
        roof=None,
        peer=PEER,
        peer_us=theirs.us,
        ratio=round(theirs.us / ours.us, 3),
        peak_nbytes=peaks.get(name) if step == BOTH else None,
        error={"grade": "sqnr_db", "sqnr_db": sqnr.get(name, sqnr[IN_TURN])},
        peer_peak_nbytes=peaks[PEER] if step == BOTH else None,
    )
