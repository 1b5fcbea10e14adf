"""The ops that a device copy bounds, from torch and from JAX, compared with that copy and with compilers.

    case --torch--> outputs --CPU's bytes, on slices--> events:    run | copy | torch.compile | torchao | separate ops
          '-JAX---> outputs --torch's bytes, all------> programs:  run | torch | copy | jax.jit

Both frameworks read the same arrays, through DLPack.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import torch
from mxep import jax_frontend, torch_frontend

from .cases.byte_check import check, count_differing, require_same
from .cases.calls import jax_call, torch_call
from .cases.case import Case, Tensors
from .cases.ops import families
from .cases.shapes import TINY_LAYER, Layer
from .clocks import device_timing
from .clocks.device_timing import Each, torch_wait
from .clocks.timing import Sample
from .figures.failures import failed, guarded
from .figures.results import Line
from .peers import compiled, formulas_jax
from .peers.device_copy import copy_of


def torch_peers(case: Case, outputs: Tensors, failures: list[str]) -> dict[str, tuple[Callable[[], Any], int]]:
    """Name -> peer that runs, and the number of its values that differ from ours."""
    candidates, peers = compiled.torch_peers(case.name, case.formula, case.inputs, outputs), {}
    if case.separate:
        candidates["separate_ops"] = partial(case.separate, torch_call, *case.inputs)
    for name, peer in candidates.items():
        try:
            theirs = peer()
            differ = count_differing(case, theirs, outputs)
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
    nbytes, allocated = case.nbytes(outputs), sum(out.nbytes for out in outputs) + case.scratch()
    peers = torch_peers(case, outputs, failures)
    del outputs
    peak = device_timing.peak_nbytes(run)
    if peak not in (None, allocated):
        failures.append(f"{case.name}: peak memory {peak} bytes, outputs and scratch {allocated}")
    samples = each({"run": run, "copy": copy_of(nbytes, device), **{name: peer for name, (peer, _) in peers.items()}})
    ours, copy = samples.pop("run"), samples["copy"]
    uses = torch_frontend.capabilities(device)[case.timed.ops[0]].uses
    for name, theirs in samples.items():
        differ = peers[name][1] if name in peers else None
        yield _line(case, "torch", nbytes, ours, name, theirs, copy, peak, uses, differ)


def jax_lines(case: Case, device: str, failures: list[str]) -> Iterator[Line]:
    run = partial(case.program, torch_call, *case.inputs)
    arrays = tuple(map(jax.dlpack.from_dlpack, case.inputs))
    program = jax.jit(partial(case.program, jax_call)).lower(*arrays).compile()
    outputs = run()
    theirs = tuple(map(torch.from_dlpack, program(*arrays)))
    require_same(case, "torch's, from JAX", case.specified(theirs), case.specified(outputs))
    del theirs
    nbytes = case.nbytes(outputs)
    copy, wait = copy_of(nbytes, device), torch_wait(device)
    candidates: dict[str, device_timing.Program] = {
        "run": (partial(program, *arrays), jax.block_until_ready),
        "torch_frontend": (run, wait),
        "copy": (copy, wait),
    }
    differ: dict[str, int] = {}
    if case.formula and hasattr(formulas_jax, case.formula):
        try:
            peer = jax.jit(getattr(formulas_jax, case.formula)).lower(*arrays).compile()
            differ["jax_jit"] = count_differing(case, tuple(map(torch.from_dlpack, peer(*arrays))), outputs)
            candidates["jax_jit"] = partial(peer, *arrays), jax.block_until_ready
        except Exception:
            failed(f"{case.name}: peer jax_jit", failures)
    del outputs
    samples = device_timing.programs(candidates)
    memory = program.memory_analysis()
    peak = memory and memory.temp_size_in_bytes + memory.output_size_in_bytes
    uses = jax_frontend.capabilities()[case.timed.ops[0]].uses
    for name in ("torch_frontend", *differ):
        yield _line(case, "jax", nbytes, samples["run"], name, samples[name], samples["copy"], peak, uses,
                    differ.get(name))  # fmt: skip


def lines(only: Sequence[str], layer: Layer, device: str, each: Each, failures: list[str]) -> Iterator[Line]:
    """The lines of the ops named."""
    for names in families.OPS.values():
        named = tuple(name for name in names if name in only)
        for case in guarded(f"inputs of {named}", families.cases(layer, torch_call, device, named), failures):
            yield from guarded(case.name, torch_lines(case, device, each, failures), failures)
            torch.cuda.empty_cache()
            yield from guarded(f"{case.name} in JAX", jax_lines(case, device, failures), failures)
        gc.collect()


def host_lines(device: str, failures: list[str]) -> Iterator[Line]:
    """Host time of every eager torch op; all ops and torch's own copy alternate."""
    source, target = torch.ones(2, 4096, dtype=torch.uint8, device=device)
    found: dict[str, Case] = {}
    runs: dict[str, Callable[[], object]] = {"copy": lambda: target.copy_(source)}
    for case in guarded("tiny inputs", families.cases(TINY_LAYER, torch_call, device), failures):
        run = partial(case.program, torch_call, *case.inputs)
        for _ in guarded(f"host_overhead of {case.name}", (run() for _ in [case]), failures):  # compiles
            name = f"{len(found)} {case.name}"
            found[name], runs[name] = case, run
    samples = device_timing.host(runs, torch.cuda.synchronize if device == "cuda" else lambda: None)
    copy = samples["copy"]
    for name, case in found.items():
        used, ours = case.timed.ops, samples[name]
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
