"""Where the time of a step is: its kernels by part, from torch.profiler.

    phase of the step --"clipping", "optimizer", "head and loss"--> the part of that name
                      '-"layers"--> op of mxep, by its family | op of torch, by its name and shapes |
                                    kernel of Inductor, by the ops in its name

A fused kernel with ops of several parts counts for one of them, the first in `FUSED`: norms take residual sums and
casts with them. On a CPU, which has no kernels, the ops' own time is counted.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from mxep.core_kernels.registry import OPS
from torch.profiler import ProfilerActivity, profile

from .sizes import experts_of
from .training import Training

IN_EXPERTS = ("dispatch", "products", "activation", "quantization")
"""The parts inside of an experts module. activation: of shared experts too."""
PARTS = ("router", *IN_EXPERTS, "attention", "dense", "norms", "head and loss", "clipping", "optimizer", "other")
_OF_FAMILY = {
    "combine": "dispatch", "permute": "dispatch", "routing": "dispatch", "router": "router", "swiglu": "activation",
    "grouped_gemm": "products", "quantize": "quantization", "fold": "quantization", "scale_layout": "quantization",
}  # fmt: skip
# Parts of names of ops in torch, in the order in which they are looked for.
_OF_TORCH = (
    ("products", ("grouped_mm",)),
    ("attention", ("scaled_dot", "flash_attention", "efficient_attention", "cudnn_attention", "flex_attention")),
    ("router", ("topk", "softmax")),
    ("dispatch", ("sort", "histc", "cumsum", "bincount", "index", "gather", "scatter")),
)
_PRODUCTS_OF_TORCH = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")
# Words in names of Inductor's kernels.
FUSED = (
    ("norms", ("rsqrt", "pow")),
    ("attention", ("scaled_dot", "flex_attention")),
    ("activation", ("silu", "clamp", "swiglu")),
    ("router", ("topk", "softmax", "sigmoid", "scatter", "gather", "masked_fill")),
    ("dispatch", ("index", "permute", "sort", "combine", "floor_divide", "histc", "cumsum")),
    ("attention", ("neg", "cos", "sin", "cat", "slice_backward", "transpose")),
)


class Op(NamedTuple):
    """name: of the op or range; shapes: of its inputs."""

    name: str
    shapes: Sequence[Sequence[int]] = ()


def part_of_op(name: str) -> str:
    """The part of an op of mxep, by its family.

    >>> part_of_op("quantize_both_fold")
    'quantization'
    """
    op = OPS.get(name)
    return _OF_FAMILY.get(op.check.__module__.split(".")[2] if op else name, "other")


def part_of(kernel: str, ops: Sequence[Op], experts: int) -> str:
    """The part of a kernel in the layers. ops: the op that launched it, and the ops and ranges around that.

    >>> part_of("cutlass_gemm", [Op("aten::mm", [[64, 32], [32, 8]])], experts=8)
    'router'
    >>> part_of("cutlass_gemm", [Op("aten::mm", [[64, 32], [32, 16]])], experts=8)
    'dense'
    >>> part_of("triton_red_fused_add_mean_mul_pow_rsqrt_0", [], experts=8)
    'norms'
    """
    for op in ops:
        if op.name.startswith("mxep::"):
            return part_of_op(op.name.removeprefix("mxep::"))
    fused = next((name for name in (kernel, *(op.name for op in ops)) if "_fused_" in name), "")
    if fused:
        return next((part for part, words in FUSED if any(word in fused for word in words)), "other")
    for part, words in _OF_TORCH:
        if any(word in op.name for op in ops if op.name.startswith(("aten::", "transformers::")) for word in words):
            return part
    for op in ops:
        if op.name in _PRODUCTS_OF_TORCH:
            return "router" if any(experts in shape for shape in op.shapes) else "dense"
    return "products" if "GroupProblemShape" in kernel else "other"


def _around(event: Any) -> Iterator[Op]:
    while event is not None:
        yield Op(event.name, [shape for shape in event.input_shapes or () if shape])
        event = event.cpu_parent


def kernels_of(seen: profile, device: str) -> Iterator[tuple[str, list[Op], float]]:
    """Every kernel of a profile: its name, the ops around its launch, and its microseconds.

    A range of `record_function` has an event on the device too, of the same name, which is no kernel. Collectives run
    at the same time as others: where a step waits for one, it is idle.
    """
    events: Any = seen.events()
    if device == "cpu":
        yield from (("", list(_around(e)), e.self_cpu_time_total) for e in events)
        return
    launched: dict[str, float] = defaultdict(float)
    for event in events:
        launches = event.kernels if event.device_type.name == "CPU" else ()
        for kernel in (kernel for kernel in launches if kernel.name != event.name and not _sends(kernel.name)):
            launched[kernel.name] += kernel.duration
            yield kernel.name, list(_around(event)), kernel.duration
    every: dict[str, float] = defaultdict(float)
    for event in events:
        if event.device_type.name == "CUDA" and not event.is_user_annotation and not _sends(event.name):
            every[event.name] += event.device_time
    # Kernels without an op around their launch, or, of Triton, in a range with their own name.
    yield from ((name, [], us - launched[name]) for name, us in every.items() if us - launched[name] > 0.5)


def _sends(kernel: str) -> bool:
    return kernel.startswith("nccl")


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


class StepParts(NamedTuple):
    """Microseconds of kernels of an optimizer step by part; other: the largest kernels of the part "other", by name."""

    us: dict[str, float]
    other: dict[str, float]


def step_parts(training: Training) -> StepParts:
    """From a profile of one micro-batch and of the update."""
    device, experts = training.device, experts_of(training.config)
    found: dict[str, float] = dict.fromkeys(PARTS, 0.0)
    other: Counter[str] = Counter()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]

    def phase_of(times: int) -> Callable[[str], AbstractContextManager[object]]:
        @contextmanager
        def run(name: str) -> Iterator[None]:
            _wait(device)
            with profile(activities=activities, record_shapes=True) as seen:
                yield
                _wait(device)
            for kernel, ops, us in kernels_of(seen, device):
                part = part_of(kernel, ops, experts) if name == "layers" else name
                found[part] += us * times
                if part == "other":
                    other[kernel or ops[0].name] += round(us * times)

        return run

    training.accumulate(micro_batches=1)  # as the later micro-batches of a step, the profiled one adds to gradients
    training.accumulate(phase_of(training.batches.micro_batches), micro_batches=1)
    training.update(phase_of(1))
    return StepParts({part: round(us, 1) for part, us in found.items()}, dict(other.most_common(5)))


def ceiling(parts_us: Mapping[str, float], experts: float, dense: float = 1.0) -> float:
    """The ratio of a step's time that the parts of the bf16 step allow: the experts and the dense layers are faster by
    their measured ratios, and the rest, idle time too, is as it is.

    >>> ceiling({"products": 40.0, "dense": 20.0, "idle": 40.0}, experts=2.0)
    1.25
    """
    total, in_dense = sum(parts_us.values()), parts_us.get("dense", 0.0)
    in_experts = sum(parts_us.get(part, 0.0) for part in IN_EXPERTS)
    return round(total / (total - in_experts - in_dense + in_experts / experts + in_dense / dense), 3)
