"""Where the time of a step in JAX is: its kernels by part, from jax.profiler.

    kernel --its operation of XLA--> the scopes of that, in the compiled program --> part, as in parts.py
                                 '-> op of mxep, by its family

A fused kernel counts for the part of its root. On a CPU, which has no kernels, XLA's operations are counted.
"""

import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.profiler import ProfileData, ProfileOptions
from mxep.core_kernels.registry import OPS

from .parts import PARTS, StepParts, part_of_op
from .training_jax import Training

_OF_SCOPE = {
    **{part: part for part in ("norms", "attention", "dense", "head and loss", "clipping", "optimizer", "router")},
    "mxep.route": "router", "mxep.dispatch": "dispatch", "mxep.combine": "dispatch", "mxep.experts": "products",
    "experts": "",
}  # fmt: skip
"""Scope -> part; "": of the peer's experts, by operation."""
_IN_EXPERTS = (
    ("products", ("ragged_dot", "ragged_dot_general", "dot_general", "transpose")),
    ("activation", ("logistic", "silu")),
)
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.*)$")
_SCOPE = re.compile(r"([^()]*)\)*$")
_AROUND = ("while", "call", "conditional")
"""Operations that run others, which are counted."""


class Operation(NamedTuple):
    """path: its scopes and its name in JAX, with "/" between them; target: of a custom call."""

    path: str
    target: str


def operations(program: str) -> dict[str, Operation]:
    """The operations of a compiled program, by name.

    >>> operations('  %dot.3 = f32[8] dot(%a, %b), metadata={op_name="jit(f)/jvp(dense)/dot_general"}')["dot.3"].path
    'jit(f)/jvp(dense)/dot_general'
    """
    found = {}
    for line in program.splitlines():
        if instruction := _INSTRUCTION.match(line):
            name, rest = instruction.groups()
            path, target = (re.search(rf'{key}="([^"]*)"', rest) for key in ("op_name", "custom_call_target"))
            found[name] = Operation(path[1] if path else "", target[1] if target else "")
    return found


def part_of(kernel: str, operation: Operation) -> str:
    """The part of a kernel.

    >>> part_of("nvjet", Operation("jit(f)/transpose(jvp(dense))/dot_general", ""))
    'dense'
    >>> part_of("sum", Operation("jit(f)/jvp(mxep.combine)/mxep_kernel", "mxep.cuda.combine"))
    'dispatch'
    """
    scopes = [_SCOPE.search(scope)[1] for scope in operation.path.split("/")]  # pyright: ignore[reportOptionalSubscript]
    part = next((_OF_SCOPE[scope] for scope in reversed(scopes) if scope in _OF_SCOPE), None)
    if part == "dense":
        return part
    for op in (operation.target.rsplit(".", 1)[-1], kernel):  # a Triton kernel has the name of its op
        if op in OPS:
            return part_of_op(op)
    if part == "":
        return next((of for of, names in _IN_EXPERTS if any(name in names for name in scopes)), "dispatch")
    return part or "other"


def kernels_of(profile: Any, on_gpu: bool) -> Iterator[tuple[str, str, float]]:
    """The kernels of a `ProfileData`: name, operation of XLA, microseconds."""
    for plane in profile.planes:
        for line in plane.lines:
            if on_gpu and not (plane.name.startswith("/device:GPU") and line.name.startswith("Stream")):
                continue
            for event in line.events:
                operation = next((str(value) for key, value in event.stats if key == "hlo_op"), "")
                if on_gpu or (operation and operation.split(".")[0] not in _AROUND):
                    yield event.name, operation, event.duration_ns / 1e3


def _profiled(run: Callable[[], Any]) -> Any:
    options = ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            jax.block_until_ready(run())
        (file,) = Path(folder).rglob("*.xplane.pb")
        return ProfileData.from_file(str(file))


def step_parts(training: Training, name: str) -> StepParts:
    """Of a candidate, from a profile of one micro-batch and of the update.

    Raises RuntimeError if the profiler saw no kernel.
    """
    on_gpu = jax.default_backend() == "gpu"
    found: dict[str, float] = dict.fromkeys(PARTS, 0.0)
    other: Counter[str] = Counter()
    jax.block_until_ready(training.accumulate(name, 1))
    phases: tuple[tuple[str, Callable[[], Any], int], ...] = (
        (name, lambda: training.accumulate(name, 1), training.batches.micro_batches),
        ("", training.update, 1),
    )
    for program, run, times in phases:
        known = operations(training.programs[program].as_text() or "")
        kernels = list(kernels_of(_profiled(run), on_gpu))
        if not any(operation in known for _, operation, _ in kernels):
            raise RuntimeError(f"step_parts: got {len(kernels)} kernels of no known operation; expected the program's")
        for kernel, operation, us in kernels:
            part = part_of(kernel, known.get(operation, Operation("", "")))
            found[part] += us * times
            if part == "other":
                other[operation or kernel] += round(us * times)
    return StepParts({part: round(us, 1) for part, us in found.items()}, dict(other.most_common(5)))
