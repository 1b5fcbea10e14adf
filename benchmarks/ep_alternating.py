"""`python -m benchmarks ep_alternating`: the layer in JAX and in PyTorch, whole processes alternating on one machine.

    turn 1   torchrun -m benchmarks ep | python -m benchmarks ep_jax
    turn 2   ep_jax | ep                                                      and so on: one process per GPU at a time
    a line per exchange of JAX: medians over all turns, against the fastest exchange of PyTorch

The peer's name is in `case.peer_is`. This process never uses a GPU.
"""

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from mxep.core_kernels.launch import fail

from examples.training.ranks import run

from . import ep, ep_jax
from .cases.ep.ep_work import BF16_WIRE
from .figures.results import Line
from .figures.tables.table_ep import TORCH_BEST

Row = Mapping[str, Any]
TURNS, PEER = 2, TORCH_BEST
NAMES = tuple(dict.fromkeys((*ep_jax.NAMES, ep.OVER_PEERS)))
"""Of recipes, sizes, PyTorch's peer memory and the ways of JAX."""


def ranks() -> int:
    """The GPUs of this machine; two processes or devices of a CPU."""
    return torch.cuda.device_count() or 2


def commands(only: Sequence[str], routing: str, out: Path) -> dict[str, list[str]]:
    """The command of a turn of each frontend, which appends its lines to `out`."""
    common = ["--routing", routing, "--commit", "0" * 40, "--out", str(out)]  # the caller knows the commit
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks())]
    of_torch = ",".join(("layer", *(name for name in only if name in ep.NAMES)))
    of_jax = ",".join(name for name in only if name in ep_jax.NAMES)
    return {
        "torch": [sys.executable, *launcher, "-m", "benchmarks", "ep", "--only", of_torch, *common],
        "jax": [sys.executable, "-m", "benchmarks", "ep_jax", *(["--only", of_jax] if of_jax else []), *common],
    }  # fmt: skip


def lines(only: Sequence[str], routing: str = "balanced") -> Iterator[Line]:
    """Raises RuntimeError if a process fails."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "lines.jsonl"
        of_frontends = list(commands(only, routing, out).items())
        for turn in range(TURNS):
            for frontend, command in of_frontends[:: -1 if turn % 2 else 1]:
                status, output = run(command)
                if status:
                    text = "\n".join(output.splitlines()[-20:])
                    fail(RuntimeError, "ep_alternating", frontend, f"exit status {status} of turn {turn + 1}\n{text}")
        yield from compared([json.loads(text) for text in out.read_text().splitlines()])


def compared(rows: Sequence[Row]) -> Iterator[Line]:
    """The lines of JAX against the fastest exchange of PyTorch of the same layer and recipe.

    rows: of all turns, of both frontends."""
    turns: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        if row["case"]["how"] != BF16_WIRE:  # products in MXFP8 alone
            turns.setdefault((row["op"], row["frontend"], json.dumps(row["case"])), []).append(row)
    for (op, frontend, _), ours in turns.items():
        if frontend != "jax":
            continue
        of_layer = _without_how(ours[0])
        peers = [of for (o, f, _), of in turns.items() if (o, f) == (op, "torch") and _without_how(of[0]) == of_layer]
        if not peers:
            fail(RuntimeError, "ep_alternating", "torch", f"no line of {of_layer}")
        theirs = min(peers, key=_us)
        us, peer_us, of_turns = _us(ours), _us(theirs), [row["us"] for row in ours]
        row = {name: value for name, value in ours[0].items() if name in Line.__annotations__}
        yield Line(
            **row
            | {
                "case": {**ours[0]["case"], "peer_is": theirs[0]["case"]["how"]},
                "us": us,
                "spread": max(round((max(of_turns) - min(of_turns)) / us, 3), *(row["spread"] for row in ours)),
                "n": sum(r["n"] for r in ours),
                "peer": PEER,
                "peer_us": peer_us,
                "ratio": round(peer_us / us, 3),
                "peer_peak_nbytes": theirs[0].get("peak_nbytes"),
            }
        )


def _without_how(row: Row) -> Row:
    return {name: value for name, value in row["case"].items() if name != "how"}


def _us(turns: Sequence[Row]) -> float:
    return round(median(row["us"] for row in turns), 2)
