"""The grouped products, from torch and from JAX, compared with torch's own, cuBLAS's dense ones and XLA's.

    case --torch--> outputs --fp64 error bound--------> events:   run | peers | dense products | copy
          '-JAX---> outputs --the same, torch's bytes-> programs: JAX | torch | dense FP8 | ragged_dot

Rates are compared within one round: the card runs at its power limit, and its clock depends on the operands.
"""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import torch
from mxep import jax_frontend, torch_frontend

from .cases.byte_check import differing
from .cases.case import Tensors
from .cases.error_check import Error, sqnr_db
from .cases.products.grouped_gemm import OPS, ProductCase, large_cases, small_case
from .cases.products.grouped_gemm_autograd import MIN_SQNR_DB
from .cases.shapes import Product, Products
from .clocks import device_timing
from .clocks.device_timing import Each, torch_wait
from .clocks.timing import Sample
from .figures.failures import failed, guarded
from .figures.results import Line
from .peers.device_copy import copy_of
from .peers.grouped_gemm import BF16, DENSE_BF16, DENSE_FP8, RAGGED_DOT, ROW_SCALED

# Between torch and JAX, where the order of sums differs: at least 108 dB measured on a CPU. Tensor cores keep fewer
# bits of a sum; unrelated sums rounded to bf16 are 52 dB apart.
MIN_JAX_SQNR_DB = 60.0
# A peer's own roof: bf16 products cannot reach the FP8 rate.
ROOF_OF = {BF16: ("bf16_mm", DENSE_BF16), RAGGED_DOT: ("bf16_mm", DENSE_BF16), ROW_SCALED: ("fp8_mm", DENSE_FP8)}
MAX_SMALL_ROWS = 131072


def _require_near(db: float) -> None:
    if not db >= MIN_SQNR_DB:
        raise AssertionError(f"{db} dB between the peer and ours; expected {MIN_SQNR_DB} or more")


def _comparable(case: ProductCase, outputs: Tensors, failures: list[str]) -> dict[str, tuple[Callable[[], Any], float]]:
    """Name -> peer that runs and computes the same product, and its SQNR in dB against ours."""
    peers = {}
    for name, peer in case.peers.items():
        try:
            db = sqnr_db(outputs, peer(), case.ends)
            _require_near(db)
        except Exception:
            failed(f"{case.name}: peer {name}", failures)
            continue
        peers[name] = peer, db
    return peers


def _runnable(
    case: ProductCase, candidates: Mapping[str, Callable[[], object]], failures: list[str]
) -> dict[str, Callable[[], object]]:
    runnable = {}
    for name, candidate in candidates.items():
        try:
            candidate()
        except Exception:
            failed(f"{case.name}: peer {name}", failures)
            continue
        runnable[name] = candidate
    return runnable


def product_lines(
    case: ProductCase, frontend: str, samples: Mapping[str, Sample], nbytes: int, peak: int | None, uses: str,
    error: Error, peer_db: Mapping[str, float], peers: Sequence[str],
) -> Iterator[Line]:  # fmt: skip
    """One line for each of `peers`. The time of a dense product is scaled to our number of operations."""
    ours = samples["run"]
    per_dense = case.flops / case.dense_flops if case.dense_flops else 1.0
    us = {name: s.us * (per_dense if name in case.dense else 1.0) for name, s in samples.items()}
    roof, reached = ("fp8_mm", us.get(DENSE_FP8)) if case.dense else ("copy", us.get("copy"))
    for name in peers:
        peer_roof, dense = ROOF_OF.get(name, (None, ""))
        yield Line(
            op=case.name,
            frontend=frontend,
            case={**case.shape, "implementation": uses},
            us=ours.us,
            spread=ours.spread,
            n=ours.n,
            nbytes=nbytes,
            flops=case.flops,
            of_roof=round(reached / ours.us, 3) if reached else None,
            roof=roof if reached else None,
            peer=name,
            peer_us=round(us[name], 2),
            ratio=round(us[name] / ours.us, 3),
            peak_nbytes=peak,
            error={**error, "peer_sqnr_db": peer_db[name]} if name in peer_db else error,
            peer_of_roof=round(us[dense] / us[name], 3) if dense in us else None,
            peer_roof=peer_roof if dense in us else None,
        )


def torch_lines(case: ProductCase, device: str, each: Each, failures: list[str]) -> Iterator[Line]:
    outputs = case.run()
    error = case.check(outputs)
    nbytes = case.read + sum(out.nbytes for out in outputs)
    peers = _comparable(case, outputs, failures)
    del outputs
    dense = _runnable(case, case.dense, failures)
    peak = device_timing.peak_nbytes(case.run)
    others = {**{name: peer for name, (peer, _) in peers.items()}, **dense, "copy": copy_of(nbytes, device)}
    samples = each({"run": case.run, **others})
    uses = torch_frontend.capabilities(device)[case.kernel].uses
    dbs = {name: db for name, (_, db) in peers.items()}
    yield from product_lines(case, "torch", samples, nbytes, peak, uses, error, dbs, tuple(others))


def jax_lines(case: ProductCase, device: str, failures: list[str]) -> Iterator[Line]:
    compiled, arguments = case.compiled()
    ours, theirs = case.run(), tuple(map(torch.from_dlpack, compiled(*arguments)))
    uses = jax_frontend.capabilities()[case.kernel].uses
    error = case.check(theirs)
    differ = sum(differing(a, b) for a, b in zip(theirs, ours, strict=True))
    on_cuda = uses.startswith("cuda") and torch_frontend.capabilities(device)[case.kernel].uses.startswith("cuda")
    if differ and on_cuda and case.same_bytes:
        raise AssertionError(f"{case.name} {dict(case.shape)}: {differ} values differ from torch's")
    if not (db := sqnr_db(theirs, ours, case.ends)) >= MIN_JAX_SQNR_DB:
        raise AssertionError(f"{case.name} {dict(case.shape)}: {db} dB from torch's; expected {MIN_JAX_SQNR_DB}")
    nbytes = case.read + sum(out.nbytes for out in ours)
    del theirs

    wait = torch_wait(device)
    candidates: dict[str, device_timing.Program] = {
        "run": (partial(compiled, *arguments), jax.block_until_ready),
        "torch_frontend": (case.run, wait),
    }
    roofs = (DENSE_FP8, DENSE_BF16) if case.jax_peers else (DENSE_FP8,)
    for name, dense in _runnable(case, {name: case.dense[name] for name in roofs}, failures).items():
        candidates[name] = dense, wait
    for name, compile_ in case.jax_peers.items():
        try:
            peer, arrays = compile_()
            _require_near(sqnr_db(ours, tuple(map(torch.from_dlpack, peer(*arrays))), case.ends))
            candidates[name] = partial(peer, *arrays), jax.block_until_ready
        except Exception:
            failed(f"{case.name}: peer {name}", failures)
    del ours
    samples = device_timing.programs(candidates)
    memory: Any = getattr(compiled, "memory_analysis", lambda: None)()
    peak = memory and memory.temp_size_in_bytes + memory.output_size_in_bytes
    shown = [name for name in samples if name == "torch_frontend" or name in case.jax_peers]
    error = {**error, "values_that_differ": differ}
    yield from product_lines(case, "jax", samples, nbytes, peak, uses, error, {}, shown)


def small_lines(p: Product, device: str, each: Each, failures: list[str]) -> Iterator[Line]:
    """The lines at M rows; while torch's bf16 product is faster, M doubles."""
    while True:
        of_one = list(torch_lines(small_case(p, device), device, each, failures))
        yield from of_one
        (ratio,) = (line.ratio for line in of_one if line.peer == BF16)
        if ratio >= 1 or 2 * p.M > MAX_SMALL_ROWS:
            break
        p = p._replace(M=2 * p.M)
    where = f"G {p.G}, K {p.K}, N {p.N}, quantization included"
    print(f"{where}: {f'not slower from {p.M} rows on' if ratio >= 1 else f'slower at {p.M} rows'}")


def lines(only: Sequence[str], products: Products, device: str, each: Each, failures: list[str]) -> Iterator[Line]:
    """The lines of the ops named. JAX runs balanced groups only: the routing does not change its program."""
    named = tuple(name for name in OPS if name in only)
    if not named:
        return
    for p in products.large:
        for case in guarded(f"operands of {p}", large_cases(p, device, named), failures):
            yield from guarded(f"{case.name} {p.routing}", torch_lines(case, device, each, failures), failures)
            if p.routing == "balanced":
                yield from guarded(f"{case.name} in JAX", jax_lines(case, device, failures), failures)
            torch.cuda.empty_cache()
        gc.collect()
    if "grouped_mm_fwd" in named:
        for p in products.small:
            yield from guarded(f"grouped_mm_fwd of {p}", small_lines(p, device, each, failures), failures)
            torch.cuda.empty_cache()
