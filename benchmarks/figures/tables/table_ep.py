"""The tables of docs/results/expert_parallel.md: one grouped GEMM and the whole layer, forward and backward."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .table_ops import machine

Row = Mapping[str, Any]
OPS = ("ep_fwd", "ep_fwd_bwd", "ep_layer_fwd", "ep_layer_fwd_bwd")
HOWS = {"bf16 wire": "bf16 all-to-alls, MXFP8 GEMMs", "in turn": "no transport",
        "deduplicate dispatch": "no transport, `deduplicate=\"dispatch\"`",
        "deduplicate both": "no transport, `deduplicate=\"both\"`",
        "peer memory": "`PeerMemory`",
        "peer memory, in rounds": "`PeerMemory`, in rounds",
        "peer memory, in a graph": "`PeerMemory`, in a CUDA graph",
        "jit": "`jit`, and recipe `bf16` as bf16",
        "jit, capacity": "`jit` with a capacity, and recipe `bf16` likewise",
        "jit, deduplicate dispatch": "`jit`, `deduplicate=\"dispatch\"`, and recipe `bf16` likewise",
        "jit, deduplicate both": "`jit`, `deduplicate=\"both\"`, and recipe `bf16` likewise",
        "jit, peer memory, in rounds": "`PeerMemory`, in rounds, and recipe `bf16` likewise",
        "jit, peer memory": "`PeerMemory`, and recipe `bf16` likewise",
        "jit, peer memory, capacity": "`PeerMemory` with a capacity, and recipe `bf16` likewise"}  # fmt: skip
TORCH_BEST = "torch_best"
"""The peer of lines of JAX, measured alternating with PyTorch: its name is in case.peer_is."""
TITLES = {"ep": "### One grouped GEMM", "ep_layer": "### The whole layer"}
HEAD = ("{sizes}, dim/hidden, experts{top_k}", "GPUs, routing", "recipe", "exchanges", "forward, ms: bf16 / mxep",
        "backward", "together", "peak memory, GiB: bf16 / mxep", "n", "dB")  # fmt: skip


def is_ep(op: str) -> bool:
    return op in OPS


def _sizes(case: Row) -> str:
    if "rows" in case:
        return f"{case['rows']}, {case['dim']}/{case['hidden']}, {case['experts']}"
    return f"{case['tokens']}, {case['dim']}/{case['hidden_dim']}, {case['num_experts']}, {case['top_k']}"


def _pair(ours: float, theirs: float) -> str:
    return f"{theirs / 1e3:.1f} / {ours / 1e3:.1f} ({theirs / ours:.2f}x)"


def _cells(one: Row, both: Row) -> tuple[str, ...]:
    case = one["case"]
    peaks = [both[name] / 2**30 for name in ("peer_peak_nbytes", "peak_nbytes") if both.get(name) is not None]
    framework = "JAX, " if one["frontend"] == "jax" else ""
    return (
        _sizes(case),
        f"{case['ranks']}, {case.get('routing', 'balanced')}",
        f"`{case['recipe']}`",
        framework + HOWS[case["how"]],
        _pair(one["us"], one["peer_us"]),
        _pair(both["us"] - one["us"], both["peer_us"] - one["peer_us"]),
        f"**{_pair(both['us'], both['peer_us'])}**",
        " / ".join(f"{peak:.1f}" for peak in peaks),
        str(both["n"]),
        str(both["error"]["sqnr_db"]),
    )


def tables(rows: Sequence[Row]) -> str:
    """The tables, in the order of the lines; "" without lines."""
    text: list[str] = []
    alternating = [row for row in rows if row["peer"] == TORCH_BEST]
    rows = [row for row in rows if row["peer"] != TORCH_BEST and row["case"]["how"] in HOWS]  # older lines have others
    for op, title in TITLES.items():
        both = {_key(row): row for row in rows if row["op"] == f"{op}_fwd_bwd"}
        found = [(row, both[_key(row)]) for row in rows if row["op"] == f"{op}_fwd" and _key(row) in both]
        if not found:
            continue
        names = {"sizes": "tokens per rank" if op == "ep_layer" else "rows per rank",
                 "top_k": ", top-k" if op == "ep_layer" else " per rank"}  # fmt: skip
        head = [cell.format(**names) for cell in HEAD]
        gpus = [{**row, "hardware": row["hardware"].split("x ")[-1]} for row, _ in found]  # a column has their number
        text += [title, "", f"{machine(gpus)}.", "", f"| {' | '.join(head)} |",
                 f"|{' --- |' * len(head)}", *(f"| {' | '.join(_cells(*pair))} |" for pair in found), ""]  # fmt: skip
    return "\n".join([*text, *_alternating(alternating)]).strip()


def _alternating(rows: Sequence[Row]) -> Iterator[str]:
    """JAX and PyTorch, forward and backward."""
    found = [row for row in rows if row["op"] == "ep_layer_fwd_bwd"]
    if not found:
        return
    head = (
        "tokens per rank, dim/hidden, experts, top-k",
        "JAX",
        "PyTorch, its fastest",
        "ms: PyTorch / JAX",
        "peak memory, GiB",
        "n",
        "dB",
    )
    yield from (
        "### JAX and PyTorch, whole processes alternating",
        "",
        f"{machine([{**row} for row in found])}.",
        "",
        f"| {' | '.join(head)} |",
        f"|{' --- |' * len(head)}",
    )
    for row in found:
        peaks = [row[name] / 2**30 for name in ("peer_peak_nbytes", "peak_nbytes") if row.get(name) is not None]
        cells = (
            _sizes(row["case"]),
            HOWS[row["case"]["how"]].split(",")[0],
            HOWS[row["case"]["peer_is"]],
            _pair(row["us"], row["peer_us"]),
            " / ".join(f"{peak:.1f}" for peak in peaks),
            str(row["n"]),
            str(row["error"]["sqnr_db"]),
        )
        yield f"| {' | '.join(cells)} |"


def _key(row: Row) -> tuple[str, str]:
    return row["frontend"], str(row["case"])
