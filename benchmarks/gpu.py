"""The kernels on one GPU, from torch and from JAX, against a device copy of as many bytes and against compilers.

    gpu_cases.py --torch--> outputs --the CPU's bytes, on a few rows?--> events:  run | copy | torch.compile
                  '--JAX--> outputs --torch's bytes, all of them?------> programs: JAX | torch | copy | jax.jit
    product_cases.py ------> gpu_products.py, the grouped products

Both frameworks read the same arrays (DLPack). A case or a peer that fails is printed and ends the run with an error
once the others are measured. `layer`, `products`, `device` and `each` are other than the defaults in a rehearsal alone.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import torch
from mxep import jax_frontend, torch_frontend
from torch import Tensor

from . import device_timing, formulas_jax, gpu_peers, gpu_products
from .gpu_calls import EPS, Each, copy_of, differing, failed, guarded, jax_call, torch_call, torch_wait
from .gpu_cases import FAMILIES, Case, Tensors, cases
from .results import Line
from .shapes import H200_LAYER, H200_PRODUCTS, TINY_LAYER, Layer, Products
from .timing import Sample


def ops_of(case: Case) -> tuple[str, ...]:
    used: list[str] = []

    def call(op: str, *tensors: Tensor, **options: Any) -> Tensors:
        used.append(op)
        return torch_call(op, *tensors, **options)

    case.program(call, *case.inputs)
    return tuple(used)


# --- right before fast ------------------------------------------------------------------------------------


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


def torch_peers(case: Case, outputs: Tensors, failures: list[str]) -> dict[str, tuple[Callable[[], Any], int]]:
    """The peers that run, each with the number of its values that differ from ours."""
    peers = {}
    for name, peer in gpu_peers.torch_peers(case, outputs).items():
        try:
            theirs = peer()
            differ = sum(differing(a, b) for a, b in zip(theirs, outputs, strict=True))
        except Exception:
            failed(f"{case.name}: peer {name}", failures)
            continue
        peers[name] = peer, differ
    return peers


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
    nbytes, allocated = case.nbytes(outputs), sum(out.nbytes for out in outputs) + case.scratch
    peers = torch_peers(case, outputs, failures)
    del outputs
    peak = device_timing.peak_nbytes(run)
    if peak not in (None, allocated):
        failures.append(f"{case.name}: peak memory {peak} bytes, outputs and scratch {allocated}")
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
    copy, wait = copy_of(nbytes, device), torch_wait(device)
    candidates: dict[str, device_timing.Program] = {
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
            failed(f"{case.name}: peer jax_jit", failures)
    del outputs
    samples = device_timing.programs(candidates)
    memory = compiled.memory_analysis()
    peak = memory and memory.temp_size_in_bytes + memory.output_size_in_bytes
    uses = jax_frontend.capabilities()[ops_of(case)[0]].uses
    for name in ("torch_frontend", *differ):
        yield _line(case, "jax", nbytes, samples["run"], name, samples[name], samples["copy"], peak, uses,
                    differ.get(name))  # fmt: skip


def host_lines(device: str, failures: list[str]) -> Iterator[Line]:
    """Host time of every eager torch op, all of them in turn and beside torch's own copy."""
    source, target = torch.ones(2, 4096, dtype=torch.uint8, device=device)
    found: dict[str, Case] = {}
    runs: dict[str, Callable[[], object]] = {"copy": lambda: target.copy_(source)}
    for case in guarded("tiny inputs", cases(TINY_LAYER, torch_call, device), failures):
        run = partial(case.program, torch_call, *case.inputs)
        for _ in guarded(f"host_overhead of {case.name}", (run() for _ in [case]), failures):  # compiles
            name = f"{len(found)} {case.name}"
            found[name], runs[name] = case, run
    samples = device_timing.host(runs, torch.cuda.synchronize if device == "cuda" else lambda: None)
    copy = samples["copy"]
    for name, case in found.items():
        used, ours = ops_of(case), samples[name]
        us = round(ours.us / len(used), 2)
        yield Line(
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


def memory_lines(only: Sequence[str], layer: Layer, device: str, each: Each, failures: list[str]) -> Iterator[Line]:
    """Of the ops that a copy bounds, all or those named."""
    for family in FAMILIES:
        if only and not set(only) & set(family):
            continue
        named = tuple(name for name in family if not only or name in only)
        for case in guarded(f"inputs of {family}", cases(layer, torch_call, device, named), failures):
            yield from guarded(case.name, torch_lines(case, device, each, failures), failures)
            torch.cuda.empty_cache()
            yield from guarded(f"{case.name} in JAX", jax_lines(case, device, failures), failures)
        gc.collect()


def lines(
    only: Sequence[str],
    layer: Layer = H200_LAYER,
    products: Products = H200_PRODUCTS,
    device: str = "cuda",
    each: Each = device_timing.events,
) -> Iterator[Line]:
    """Check and measure every op, or those named. Raises RuntimeError at the end if anything failed."""
    known = {*(name for names in FAMILIES for name in names), "host_overhead", *gpu_products.OPS}
    if unknown := set(only) - known:
        raise ValueError(f"gpu: ops: got {', '.join(sorted(unknown))}; allowed: {', '.join(sorted(known))}")
    failures: list[str] = []
    if not only or "host_overhead" in only:
        yield from guarded("host_overhead", host_lines(device, failures), failures)
    yield from memory_lines(only, layer, device, each, failures)
    yield from gpu_products.lines(only, products, device, each, failures)
    if failures:
        raise RuntimeError("gpu: " + "; ".join(failures))
