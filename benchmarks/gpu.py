"""The kernels on one GPU, from torch and from JAX, against a device copy of as many bytes and against compilers.

    gpu_cases.py --torch--> outputs --the CPU's bytes, on a few rows?--> events:  run | copy | torch.compile
                  '--JAX--> outputs --torch's bytes, all of them?------> batches: JAX | torch | copy | jax.jit

Both frameworks read the same arrays (DLPack). A case or a peer that fails is printed and ends the run with an
error once the others are measured. `layer`, `device` and `each` are other than the defaults in a rehearsal alone.
"""

import gc
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import jax
import numpy as np
import torch
from mxep import jax_frontend, torch_frontend
from mxep.jax_frontend import _call as jax_launch
from mxep.jax_frontend import ops as jax_ops
from mxep.torch_frontend import ops as torch_ops
from torch import Tensor

from . import device_timing, formulas_jax, gpu_peers
from .gpu_cases import FAMILIES, Case, Tensors, cases
from .results import Line
from .shapes import H200_LAYER, TINY_LAYER, Layer
from .timing import Sample

Each = Callable[[device_timing.Candidates], dict[str, Sample]]
EPS = 2.0**-23
# Copied piece by piece: the two buffers of a whole would not fit beside the largest case.
COPY_NBYTES = {"cuda": 4 << 30, "cpu": 1 << 20}
CHUNK = 1 << 28
BATCH_US = 10_000


def torch_call(op: str, *tensors: Tensor, **options: Any) -> Tensors:
    outputs = getattr(torch_ops, op)(*tensors, **options)
    return outputs if isinstance(outputs, tuple) else (outputs,)


def jax_call(op: str, *arrays: jax.Array, **options: Any) -> tuple[jax.Array, ...]:
    return jax_launch.call(jax_ops.OPS[op], *arrays, **options)


def ops_of(case: Case) -> tuple[str, ...]:
    used: list[str] = []

    def call(op: str, *tensors: Tensor, **options: Any) -> Tensors:
        used.append(op)
        return torch_call(op, *tensors, **options)

    case.program(call, *case.inputs)
    return tuple(used)


# --- right before fast ------------------------------------------------------------------------------------


def _bits(x: Tensor) -> Tensor:
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.itemsize])


def differing(a: Tensor, b: Tensor) -> int:
    """How many values have other bits; by chunks, or the comparison would need as much memory as the outputs."""
    pairs = zip(_bits(a).flatten().split(CHUNK), _bits(b).flatten().split(CHUNK), strict=True)
    return sum(int((x != y).sum()) for x, y in pairs)


def require_same(case: Case, who: str, got: Sequence[Tensor], want: Sequence[Tensor]) -> None:
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        where = f"{case.name} {dict(case.shape)}: output {i}"
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            raise AssertionError(f"{where} is {a.dtype} {tuple(a.shape)}, {who} is {b.dtype} {tuple(b.shape)}")
        if n := differing(a, b):
            raise AssertionError(f"{where}: {n} values differ from {who}")


def slices(case: Case, outputs: Tensors) -> list[slice]:
    """The rows that the CPU repeats: the first, the middle and the last, and where an array passes 2^31 elements."""
    n = case.slice_
    starts = {0, case.rows // 2 // n * n, max(case.rows - n, 0)}
    for x in (*case.inputs, *outputs):
        if len(x) == case.rows and x.numel() > 2**31:
            boundary = 2**31 // (x.numel() // len(x)) // n * n
            starts |= {boundary - n, boundary}
    return [slice(start, start + n) for start in sorted(starts)]


def check(case: Case, outputs: Tensors) -> None:
    """Raise AssertionError unless some rows of the outputs (see `slices`) are what C++ on the CPU computes."""
    for at in slices(case, outputs):
        small, got = case.part(case.inputs, outputs, at)
        small, got = (tuple(x.cpu().contiguous() for x in tensors) for tensors in (small, got))
        want = case.program(torch_call, *small)
        exact = len(want) - (case.magnitude is not None)
        require_same(case, f"the CPU's at {at.start}", got[:exact], want[:exact])
        if case.magnitude is not None:
            bound = 2 * EPS * small[0].shape[-1] * case.magnitude(*small)
            if not bool(((got[-1].double() - want[-1].double()).abs() <= bound).all()):
                raise AssertionError(f"{case.name} {dict(case.shape)}: the last output is past the bound of its sums")


# --- what is timed ----------------------------------------------------------------------------------------


@cache
def _copy_buffers(device: str) -> tuple[Tensor, Tensor]:
    source = torch.randint(1, 255, (COPY_NBYTES[device],), dtype=torch.uint8, device=device)
    return source, torch.empty_like(source)


def copy_of(nbytes: int, device: str) -> Callable[[], object]:
    """A device copy that reads and writes `nbytes` together."""
    half = nbytes // 2
    source, target = _copy_buffers(device)
    sizes = [min(len(source), half - at) for at in range(0, half, len(source))]

    def run() -> None:
        for size in sizes:
            target[:size].copy_(source[:size])

    return run


def torch_peers(case: Case, outputs: Tensors, failures: list[str]) -> dict[str, tuple[Callable[[], Any], int]]:
    """The peers that run, each with the number of its values that differ from ours."""
    peers = {}
    for name, peer in gpu_peers.torch_peers(case, outputs).items():
        try:
            theirs = peer()
            differ = sum(differing(a, b) for a, b in zip(theirs, outputs, strict=True))
        except Exception:
            _failed(f"{case.name}: peer {name}", failures)
            continue
        peers[name] = peer, differ
    return peers


def _failed(what: str, failures: list[str]) -> None:
    failures.append(what)
    print(f"FAILED: {what}", file=sys.stderr)
    traceback.print_exc()


def _line(
    case: Case, frontend: str, nbytes: int, ours: Sample, peer: str, theirs: Sample, copy: Sample,
    peak: int | None, implementation: str, differ: int | None = None,
) -> Line:  # fmt: skip
    error: dict[str, object] = {"grade": "exact", "bytes_that_differ": 0}
    if case.magnitude is not None:
        error["last_output"] = "gemm_bound"
    if differ is not None:
        error["peer_values_that_differ"] = differ
    return Line(
        op=case.name,
        frontend=frontend,
        case={**case.shape, "implementation": implementation},
        us=ours.us,
        spread=ours.spread,
        n=ours.n,
        nbytes=nbytes,
        flops=0,
        of_roof=round(copy.us / ours.us, 3) if case.by_bytes else None,
        roof="copy" if case.by_bytes else None,
        peer=peer,
        peer_us=theirs.us,
        ratio=round(theirs.us / ours.us, 3),
        peak_nbytes=peak,
        error=error,
    )


def torch_lines(case: Case, device: str, each: Each, failures: list[str]) -> Iterator[Line]:
    run = partial(case.program, torch_call, *case.inputs)
    outputs = run()
    check(case, outputs)
    nbytes, allocated = case.nbytes(outputs), sum(out.nbytes for out in outputs)
    peers = torch_peers(case, outputs, failures)
    del outputs
    peak = device_timing.peak_nbytes(run)
    if peak not in (None, allocated):
        failures.append(f"{case.name}: peak memory {peak} bytes, outputs {allocated}")
    samples = each({"run": run, "copy": copy_of(nbytes, device), **{name: peer for name, (peer, _) in peers.items()}})
    ours, copy = samples.pop("run"), samples["copy"]
    uses = torch_frontend.capabilities(device)[ops_of(case)[0]].uses
    for name, theirs in samples.items():
        differ = peers[name][1] if name in peers else None
        yield _line(case, "torch", nbytes, ours, name, theirs, copy, peak, uses, differ)


def jax_lines(case: Case, device: str, failures: list[str]) -> Iterator[Line]:
    run = partial(case.program, torch_call, *case.inputs)
    arrays = tuple(map(jax.dlpack.from_dlpack, case.inputs))
    compiled = jax.jit(partial(case.program, jax_call)).lower(*arrays).compile()
    outputs = run()
    theirs = tuple(map(torch.from_dlpack, compiled(*arrays)))
    require_same(case, "torch's, from JAX", theirs, outputs)
    del theirs
    nbytes = case.nbytes(outputs)
    wait_torch = torch.cuda.synchronize if device == "cuda" else None
    copy = copy_of(nbytes, device)

    def wait(_: object) -> None:
        if wait_torch:
            wait_torch()

    candidates: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
        "run": (partial(compiled, *arrays), jax.block_until_ready),
        "torch_frontend": (run, wait),
        "copy": (copy, wait),
    }
    differ: dict[str, int] = {}
    if case.formula and hasattr(formulas_jax, case.formula):
        try:
            peer = jax.jit(getattr(formulas_jax, case.formula)).lower(*arrays).compile()
            differ["jax_jit"] = sum(
                differing(torch.from_dlpack(a), b) for a, b in zip(peer(*arrays), outputs, strict=True)
            )
            candidates["jax_jit"] = partial(peer, *arrays), jax.block_until_ready
        except Exception:
            _failed(f"{case.name}: peer jax_jit", failures)
    del outputs
    (estimate,) = device_timing.batches({"run": candidates["run"]}, calls=4, rounds=1).values()
    calls = int(np.clip(BATCH_US / estimate.us, 4, 200))
    samples = device_timing.batches(candidates, calls)
    memory = compiled.memory_analysis()
    peak = memory and memory.temp_size_in_bytes + memory.output_size_in_bytes
    uses = jax_frontend.capabilities()[ops_of(case)[0]].uses
    for name in ("torch_frontend", *differ):
        yield _line(case, "jax", nbytes, samples["run"], name, samples[name], samples["copy"], peak, uses,
                    differ.get(name))  # fmt: skip


def host_line(case: Case, device: str) -> Line:
    """Host time of one eager torch op, beside that of torch's own copy."""
    source, target = torch.ones(2, 4096, dtype=torch.uint8, device=device)
    run = partial(case.program, torch_call, *case.inputs)
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    run()
    ours, copy = device_timing.host({"run": run, "copy": lambda: target.copy_(source)}, wait).values()
    used = ops_of(case)
    us = round(ours.us / len(used), 2)
    return Line(
        op="host_overhead",
        frontend="torch",
        case={**case.shape, "ops": " ".join(used)},
        us=us,
        spread=ours.spread,
        n=ours.n,
        nbytes=0,
        flops=0,
        of_roof=None,
        roof=None,
        peer="copy",
        peer_us=copy.us,
        ratio=round(copy.us / us, 3),
        peak_nbytes=None,
        error={"grade": "exact", "bytes_that_differ": 0},
    )


def _guarded(what: str, items: Iterator[Any], failures: list[str]) -> Iterator[Any]:
    try:
        yield from items
    except Exception:
        _failed(what, failures)


def lines(
    only: Sequence[str], layer: Layer = H200_LAYER, device: str = "cuda", each: Each = device_timing.events
) -> Iterator[Line]:
    """Check and measure every op, or those named. Raises RuntimeError at the end if anything failed."""
    known = {*(name for names in FAMILIES for name in names), "host_overhead"}
    if unknown := set(only) - known:
        raise ValueError(f"gpu: ops: got {', '.join(sorted(unknown))}; allowed: {', '.join(sorted(known))}")
    failures: list[str] = []
    if not only or "host_overhead" in only:
        for case in _guarded("tiny inputs", cases(TINY_LAYER, torch_call, device), failures):
            yield from _guarded(f"host_overhead of {case.name}", (host_line(c, device) for c in [case]), failures)
    for family in FAMILIES:
        if only and not set(only) & set(family):
            continue
        named = tuple(name for name in family if not only or name in only)
        for case in _guarded(f"inputs of {family}", cases(layer, torch_call, device, named), failures):
            yield from _guarded(case.name, torch_lines(case, device, each, failures), failures)
            torch.cuda.empty_cache()
            yield from _guarded(f"{case.name} in JAX", jax_lines(case, device, failures), failures)
        gc.collect()
    if failures:
        raise RuntimeError("gpu: " + "; ".join(failures))
