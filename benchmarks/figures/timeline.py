"""`python -m benchmarks.figures.timeline TRACE --out FILE.svg`: what ran when in one step, from a torch.profiler trace.

torchrun ... -m benchmarks ep --trace TRACE --> kineto's JSON of rank 0 --STAGES--> lanes, times, and a picture

GEMMs            the experts' grouped GEMMs
other kernels    quantization, gathers, SwiGLU, sums, the router
copies/wire      copies by the engines, NCCL's kernels

An event is named by its stage in docs/concepts/pipeline.md. The backward begins with the first event that
the host launched after the forward returned.
"""

import argparse
import json
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from mxep.core_kernels.launch import fail
from torch.profiler import ProfilerActivity, profile, record_function

LANES = ("GEMMs", "other kernels", "copies/wire")
DIRECTIONS = ("forward", "backward")
MARK = "benchmark.forward"
ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver")
# The first pattern that a name contains gives lane and stage. Templated kernels have their arguments in their names.
STAGES = (
    (r"nccl|c10d::|gloo:", "copies/wire", "all-to-all"),
    (r"Memcpy PtoP|Memcpy P2P", "copies/wire", "copies from peers"),
    (r"Memcpy DtoD", "copies/wire", "rows of this rank"),
    (r"Memcpy", "copies/wire", "counts, host"),
    (r"grouped_|\bmm_\w*kernel|wgrad_\w*kernel", "GEMMs", "GEMMs"),
    (r"swiglu|backward_tiles|backward_rows", "other kernels", "SwiGLU"),
    (r"fold_matrices", "other kernels", "quantize weights"),
    (r"combine", "other kernels", "sum over replicas"),
    (r"route|softmax|topk|gemm|nvjet|cutlass|splitK|aten::mm", "other kernels", "router"),
    (r"count_slots|sum_counts|place_slots|sort|row_map", "other kernels", "sort_by_expert"),
    (r"quantize|fold|balance_kernel|row_kernel|row_packed_kernel|both_kernel|col_kernel", "other kernels", "quantize"),
    (r"rows_kernel|mx_kernel|permute|index|gather", "other kernels", "gather"),
)
OTHERS = "other kernels", "others"
COLORS = {
    "GEMMs": "tab:red", "all-to-all": "tab:blue", "copies from peers": "tab:blue", "rows of this rank": "tab:cyan",
    "counts, host": "lightsteelblue", "SwiGLU": "tab:orange", "quantize weights": "tab:olive", "quantize": "gold",
    "sum over replicas": "tab:purple", "router": "tab:pink", "sort_by_expert": "tab:brown", "gather": "tab:green",
    "others": "lightgray",
}  # fmt: skip


class Event(NamedTuple):
    """start, end: microseconds since the first event of the step."""

    direction: str
    lane: str
    stage: str
    start: float
    end: float


def trace(step: Callable[[Callable[[], Any]], object], forward: Callable[[], Any], path: Path, here: bool) -> None:
    """Run the step on all ranks, and where `here` is true write its profile. The steps before warm up."""
    on_gpu = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]

    def marked() -> Any:
        with record_function(MARK):
            return forward()

    def run() -> None:
        dist.barrier()  # within the profile, whose start delays one rank; `read` leaves out what is before the forward
        if on_gpu:
            torch.cuda.synchronize()
        step(marked)
        if on_gpu:
            torch.cuda.synchronize()

    for _ in range(2):
        run()
    for last in (False, True):  # the first profile prepares the profiler
        with profile(activities=activities) if here else nullcontext() as found:
            run()
        if last and found is not None:
            found.export_chrome_trace(str(path))
            print(f"wrote {path}")


def stage_of(name: str) -> tuple[str, str]:
    """Lane and stage of an event.

    >>> stage_of("void mxep::cuda::sm90::(anonymous namespace)::grouped_gemm_fp8_nt<SpanScales>(Maps, Problem)")
    ('GEMMs', 'GEMMs')
    """
    return next(((lane, stage) for pattern, lane, stage in STAGES if re.search(pattern, name)), OTHERS)


def read(path: Path) -> list[Event]:
    """The events of a trace in their order. Raises ValueError if it has none, or no forward that `trace` marked."""
    found = [e for e in json.loads(path.read_text())["traceEvents"] if e.get("ph") == "X"]
    marks = [e for e in found if e["name"] == MARK and e.get("cat") == "user_annotation"]
    ran = sorted((e for e in found if e.get("cat") in ON_GPU), key=lambda e: e["ts"]) or _of_a_cpu(found)
    launches = {e["args"]["correlation"]: e["ts"] for e in found
                if e.get("cat") in LAUNCHES and "correlation" in e.get("args", {})}  # fmt: skip

    def launched(e: dict[str, Any]) -> float | None:
        """None of a copy by address, whose launch is not in the trace; an op on a CPU is its own launch."""
        return launches.get(e["args"]["correlation"]) if e["cat"] in ON_GPU else e["ts"]

    ran = [(e, at) for e, at in ((e, launched(e)) for e in ran) if marks and (at or e["ts"]) >= marks[-1]["ts"]]
    if not ran:
        got = f"{path.name} with {len(marks)} marks of a forward and nothing after them"
        fail(ValueError, "timeline", "path", got, "allowed: a trace of python -m benchmarks ep --trace FILE")
    returned, first = marks[-1]["ts"] + marks[-1]["dur"], ran[0][0]["ts"]
    backward = min((e["ts"] for e, at in ran if at is not None and at > returned), default=float("inf"))
    kernels = {e.get("args", {}).get("stream") for e, _ in ran if e["cat"] == "kernel"}
    events = []
    for e, _ in ran:
        lane, stage = stage_of(e["name"])
        if stage == "rows of this rank" and e.get("args", {}).get("stream") not in kernels:
            stage = "copies from peers"  # whose memory is mapped here
        start = e["ts"] - first
        events.append(Event(DIRECTIONS[e["ts"] >= backward], lane, stage, start, start + e["dur"]))
    return events


def _of_a_cpu(found: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The outermost ops of each thread; of ranges of autograd and of ours, the ops within."""
    ops = [e for e in found if e.get("cat") == "cpu_op" or re.match("gloo:", e["name"])]
    ops = [e for e in ops if not re.search(r"autograd::|Backward|^_\w+$|^[A-Z]", e["name"])]
    ops.sort(key=lambda e: (e["ts"], -e["dur"]))
    outer, ends = [], {}
    for e in ops:
        if e["ts"] >= ends.get(e["tid"], 0):
            ends[e["tid"]] = e["ts"] + e["dur"]
            outer.append(e)
    return outer


def _length(spans: Iterable[tuple[float, float]]) -> float:
    """The time that spans cover together."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total, until = total + max(end - max(start, until), 0), max(end, until)
    return total


def table(events: Sequence[Event]) -> str:
    """Milliseconds of each stage, and of exposed communication: copies or collectives run and no kernel does."""
    of = {d: [e for e in events if e.direction == d] for d in DIRECTIONS}
    stages = sorted({(LANES.index(e.lane), e.lane, e.stage) for e in events})

    def row(name: str, ms: Callable[[list[Event]], float]) -> str:
        return f"{name:36}" + "".join(f"{ms(of[direction]):10.3f}" for direction in DIRECTIONS)

    def covered(wanted: Callable[[Event], bool]) -> Callable[[list[Event]], float]:
        return lambda found: _length((e.start, e.end) for e in found if wanted(e)) / 1e3

    kernel, anything = covered(lambda e: e.lane != LANES[2]), covered(lambda e: True)
    return "\n".join([
        f"{'ms':36}" + "".join(f"{direction:>10}" for direction in DIRECTIONS),
        *(row(f"{lane}: {stage}", covered(lambda e, of=stage: e.stage == of)) for _, lane, stage in stages),
        row("any kernel", kernel),
        row("copies/wire without a kernel", lambda found: anything(found) - kernel(found)),
        row("from the first to the last",
            lambda found: (max(e.end for e in found) - min(e.start for e in found)) / 1e3 if found else 0.0),
    ])  # fmt: skip


def draw(events: Sequence[Event], path: Path) -> None:
    """Write the picture: forward above backward, a row per lane, one color per stage."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    from .picture import REPRODUCIBLE, save

    with rc_context(REPRODUCIBLE):
        figure = Figure(figsize=(11, 4.5), layout="constrained")
        panels = figure.subplots(len(DIRECTIONS), 1, squeeze=False)[:, 0]
        for axes, direction in zip(panels, DIRECTIONS, strict=True):
            of = [e for e in events if e.direction == direction]
            first = min((e.start for e in of), default=0.0)
            for lane, stage in dict.fromkeys((e.lane, e.stage) for e in of):
                bars = [((e.start - first) / 1e3, (e.end - e.start) / 1e3)
                        for e in of if (e.lane, e.stage) == (lane, stage)]  # fmt: skip
                axes.broken_barh(bars, (LANES.index(lane) - 0.4, 0.8), color=COLORS[stage])
            axes.set_yticks(range(len(LANES)), LANES, fontsize="small")
            axes.set(ylim=(len(LANES) - 0.5, -0.5), title=direction)
            axes.grid(axis="x", alpha=0.2)
        panels[-1].set_xlabel("ms")
        shown = [stage for stage in COLORS if any(e.stage == stage for e in events)]
        patches = [Patch(color=COLORS[stage], label=stage) for stage in shown]
        figure.legend(handles=patches, fontsize="x-small", loc="outside lower center", ncols=7)
        save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.figures.timeline", description="Draw a step.")
    parser.add_argument("trace", type=Path, help="a trace of python -m benchmarks ep --trace FILE")
    parser.add_argument("--out", type=Path, required=True, help="an .svg or .png")
    args = parser.parse_args()
    events = read(args.trace)
    print(table(events))
    draw(events, args.out)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
