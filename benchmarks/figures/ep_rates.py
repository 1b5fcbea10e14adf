"""Inputs of the model of expert parallelism and measurements to compare it with: recorded rates and times of pipelines.

results/h200.jsonl, h200_ep_in_turn/ --> rates
results/h200_ep.jsonl, h200_ep_in_turn/ --> measured
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from statistics import median
from typing import Any, NamedTuple

from mxep.core_kernels.policy.recipe import Recipe, TransferName

from ..ep_model import BF16, MX, Case, Rates, Wire, backward, forward, in_turn, overlapped, plain
from .results import RESULTS, newest

FOLDER = RESULTS / "h200_ep_in_turn"
GPUS = 8
"""Of a host."""
NETWORK = 40.9e9
"""Bytes/s out of each GPU between hosts: two hosts of eight H200, InfiniBand of 400 Gb/s per GPU, a dispatch of bf16
rows (deepseek-ai/DeepEP, issue 493)."""
GPU_BOUND = 2**23
"""dim x hidden from which a chunk takes the GPU longer than the host: 2048/1408 is below, 7168/2048 above."""
PRODUCTS = {"grouped_mm_fwd": "forward", "grouped_mm_dgrad": "dgrad", "grouped_mm_wgrad": "wgrad"}


@cache
def _lines() -> tuple[dict[str, Any], ...]:
    return tuple(row for row in newest("h200") if row["frontend"] == "torch")


def rates(dim: int, hidden: int, ranks: int) -> Rates:
    """Measured rates of the product whose size is nearest to dim x hidden, for so many ranks."""
    rows = [r for r in _lines() if r["case"].get("routing") == "balanced" and r["case"].get("operands") != "bf16"]
    rows = [r for r in rows if {*PRODUCTS, "grouped_mm_exact"} >= {r["op"]}]
    size = lambda r: r["case"]["K"] * r["case"]["N"]  # noqa: E731
    nearest = min(map(size, rows), key=lambda other: abs(other - dim * hidden))
    products = {}
    for r in rows:
        if size(r) == nearest:
            name = PRODUCTS.get(r["op"], "bf16")
            products[name] = r["flops"] / r["us"] * 1e6
            if r["peer"] == "torch_grouped_mm_bf16" and name != "bf16":
                products[f"plain {name}"] = r["flops"] / r["peer_us"] * 1e6
    names = {"permute_mx_fold": "fold"}
    ops = ("quantize_row", "quantize_both_fold", "requantize_col_fold", "permute_mx", "permute_mx_fold", "unpermute",
           "dequantize", "combine")  # fmt: skip
    passes = {
        names.get(r["op"], r["op"]): r["nbytes"] / r["us"] * 1e6
        for r in _lines()
        if r["op"] in ops and r["peer"] == "copy" and r["case"].get("direction") != "bwd"
    }
    measured = json.loads((FOLDER / "wire.json").read_text())
    nccl = Wire(((1.0, 1 / (measured["nccl"] * 1e9)),))
    engines = measured["one pair" if ranks == 2 else "in turns"]
    blocks = [(int(mib) * 2**20, int(mib) * 2**20 / (gbs * 1e9)) for mib, gbs in engines.items()]
    host = [r for r in _lines() if r["op"] == "host_overhead"]
    return Rates(
        products,
        passes,
        nccl if ranks > GPUS else Wire(tuple(blocks)),
        nccl,
        NETWORK,
        GPUS,
        median(r["us"] for r in host) * 1e-6,
        median(r["peer_us"] for r in host) * 1e-6,
    )


def wire_of_chunks(recorded: Iterable[Mapping[str, Any]], ranks: int) -> Wire | None:
    """Of recorded lines of so many GPUs: the rate of `Collectives`, chunk by chunk with nothing between them, the
    median of the sizes above GPU_BOUND; None without such lines."""
    found = []
    for row in recorded:
        c, stages = row["case"], row.get("stages_us")
        if (
            c["ranks"] == ranks
            and row["op"] == "ep_fwd_bwd"
            and c["how"] == "collectives"
            and stages
            and c["dim"] * c["hidden"] > GPU_BOUND
        ):
            case = Case(c["ranks"], c["rows"], c["dim"], c["hidden"], c["experts"], Recipe.parse(c["recipe"]))
            transfers: tuple[tuple[TransferName, int], ...] = (
                ("dispatch", case.dim),
                ("combine", case.hidden),
                ("combine_grad", case.hidden),
                ("dispatch_grad", case.dim),
            )
            width = sum(values * (MX if case.recipe.sends_mx(transfer) else BF16) for transfer, values in transfers)
            found.append(case.rows * (1 - 1 / case.ranks) * width / stages["wire"] * 1e6)
    return Wire(((1.0, 1 / median(found)),)) if found else None


class Measured(NamedTuple):
    """how: "bf16", "in turn" or the name of a transport. milliseconds: forward, and with its backward."""

    case: Case
    how: str
    milliseconds: tuple[float, float]


def measured(recorded: Iterable[Mapping[str, Any]]) -> Iterator[Measured]:
    """Of recorded lines of `python -m benchmarks ep`; cases that they lack from h200_ep_in_turn."""
    found: dict[tuple[Any, ...], list[float]] = {}
    for row in recorded:
        c, step = row["case"], row["op"] == "ep_fwd_bwd"
        if c.get("routing", "balanced") != "balanced":
            continue
        for how, us in ((c["how"], row["us"]), ("bf16", row["peer_us"])):
            recipe = "mxfp8" if how == "bf16" else c["recipe"]
            key = c["ranks"], c["rows"], c["dim"], c["hidden"], c["experts"], recipe, how
            found.setdefault(key, [0.0, 0.0])[step] = us / 1e3
    for text in (FOLDER / "lines.jsonl").read_text().splitlines():
        c = json.loads(text)
        for how, name in ((c["how"], ""), ("bf16", "bf16_")):
            key = c["ranks"], c["rows"], c["dim"], c["hidden"], c["experts"], c["recipe"], how
            found.setdefault(key, [c[f"{name}fwd_ms"], c[f"{name}fwd_bwd_ms"]])
    for (ranks, rows, dim, hidden, experts, recipe, how), (one, both) in sorted(found.items()):
        if how in ("bf16", "in turn", "collectives", "copy engines"):
            yield Measured(Case(ranks, rows, dim, hidden, experts, Recipe.parse(recipe)), how, (one, both))


def reckoned(of: Measured, chunks: Wire | None = None, unhidden: float = 0.0) -> tuple[float, float]:
    """Milliseconds of the forward, and with its backward. chunks: the rate of `Collectives`, if it is known."""
    case, found = of.case, rates(of.case.dim, of.case.hidden, of.case.ranks)
    if of.how == "bf16":
        one, two = plain(case, found)
    else:
        if of.how == "collectives":
            found = found._replace(copies=chunks or found.collectives)
        one, two = (
            in_turn(d) if of.how == "in turn" else overlapped(d, unhidden)
            for d in (forward(case, found), backward(case, found))
        )
    return one * 1e3, (one + two) * 1e3
