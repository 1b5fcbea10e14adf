"""The README's tables: bf16 and MXFP8 side by side, of one layer and a grouped product, and of a layer on four GPUs."""

from collections.abc import Iterator, Sequence
from typing import Any

from .tables.table_moe_layer import in_a_row, peaks

Row = dict[str, Any]
SIZES = "tokens, D, F, experts, k"
HEAD = ("forward and backward", SIZES, "bf16, ms", "MXFP8, ms", "speed-up", "dB", "peak memory, GiB: bf16 / MXFP8", "n")
RECIPE = "mxfp8"
LAYERS = ((16384, 7168, 2048, 32, 8), (16384, 2048, 1408, 64, 6), (16384, 4096, 14336, 8, 2), (4096, 2048, 768, 128, 8))
PRODUCT = {"M": 131072, "K": 7168, "N": 2048, "G": 8, "routing": "balanced", "recipe": RECIPE}
"""131072 rows, 8 experts of 7168 x 2048: one rank's share of a layer as large as DeepSeek-V3's."""
RANKS = 4
HOWS = {
    "in turn": "no transport",
    "collectives": "`Collectives`",
    "copy engines": "`CopyEngines`",
    "peer memory": "`PeerMemory`",
    "peer memory, in a graph": "`PeerMemory`, in a CUDA graph",
}
IN_JAX = {"jit": "by all-to-all", "jit, peer memory, capacity": "by `peer_memory` with a capacity"}


def _sizes(case: Row) -> tuple[int, ...]:
    return tuple(case[name] for name in ("tokens", "dim", "hidden_dim", "num_experts", "top_k"))


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}", *(f"| {' | '.join(row)} |" for row in rows)]


def _sizes_of(row: Row) -> str:
    return ", ".join(map(str, _sizes(row["case"])))


def _ms(us: float) -> str:
    return f"{us / 1e3:.1f}"


def _cells(what: str, sizes: str, row: Row) -> tuple[str, ...]:
    db = row["error"].get("peer_sqnr_db", row["error"]["sqnr_db"])
    memory = peaks(row) if row.get("peer_peak_nbytes") and row["peak_nbytes"] else ""
    return what, sizes, _ms(row["peer_us"]), _ms(row["us"]), f"{row['ratio']:.2f}x", str(db), memory, str(row["n"])


def _run(rows: Sequence[Row]) -> str:
    """Card, commits and dates of lines."""
    return "; ".join(dict.fromkeys(f"{r['hardware']}, commit {r['commit'][:7]} of {r['date']}" for r in rows))


def layers(rows: Sequence[Row]) -> list[Row]:
    """Back-to-back steps, forward and backward, of each size that is recorded."""
    of = [row for row in rows if row["op"] == "moe_layer_fwd_bwd" and row["case"]["recipe"] == RECIPE
          and not {"weights", "launch", "routing"} & row["case"].keys()]  # fmt: skip
    found = (in_a_row([row for row in of if _sizes(row["case"]) == sizes]) for sizes in LAYERS)
    return [row for row in found if row]


def _product(rows: Sequence[Row]) -> list[Row]:
    """Forward and both gradients of a grouped product, with all quantization."""
    of = [row for row in rows if row["op"] == "grouped_mm_autograd" and row["peer"] == "torch_grouped_mm_bf16"]
    return [row for row in of if {**row["case"], "implementation": ""} == {**PRODUCT, "implementation": ""}]


def _parallel(rows: Sequence[Row]) -> Iterator[dict[str, Row]]:
    """By how, the lines of a size on `RANKS` GPUs."""
    of = [row for row in rows if row["op"] == "ep_layer_fwd_bwd" and row["case"]["ranks"] == RANKS
          and row["case"]["recipe"] == RECIPE and row["case"]["routing"] == "balanced"]  # fmt: skip
    for sizes in LAYERS:
        if found := {row["case"]["how"]: row for row in of if _sizes(row["case"]) == sizes}:
            yield found


def _with_ratio(row: Row) -> str:
    return f"{_ms(row['us'])} ({row['ratio']:.2f}x)"


def _of_ranks(found: Sequence[dict[str, Row]]) -> list[str]:
    """The table of a layer on several GPUs, and a note of JAX, whose bf16 is another."""
    torch = [{how: of[how] for how in HOWS if how in of} for of in found]
    hows = [how for how in HOWS if any(how in of for of in torch)]
    rows = []
    for of in torch:
        one = next(iter(of.values()))
        cells = [_with_ratio(of[how]) if how in of else "" for how in hows]
        rows.append((_sizes_of(one), _ms(one["peer_us"]), *cells, str(one["error"]["sqnr_db"]), str(one["n"])))
    in_jax = [
        f"{_sizes_of(of['jit'])}: " + ", ".join(f"{_with_ratio(of[how])} {IN_JAX[how]}" for how in IN_JAX if how in of)
        for of in found
        if "jit" in of
    ]
    head = (f"{SIZES}, {RANKS} GPUs", "bf16, ms", *(HOWS[how] for how in hows), "dB", "n")
    jax = "; ".join(in_jax)
    note = f"In JAX, against the same program with recipe `bf16`: {jax} (n {found[0]['jit']['n']})." if jax else ""
    lines = [row for of in found for row in of.values()]
    return [*_table(head, rows), "", f"{_run(lines)}; tokens per GPU, bf16 with NCCL's all-to-alls. {note}".strip()]


def table(rows: Sequence[Row], parallel: Sequence[Row]) -> str:
    """A row per comparison that was measured; parallel: the lines of several GPUs. "" without a layer."""
    of_layers, of_ranks, product = layers(rows), list(_parallel(parallel)), _product(rows)
    if not of_layers:
        return ""
    ratios = [row["ratio"] for row in of_layers]
    m, k, n, g = (PRODUCT[name] for name in "MKNG")
    cells = [
        *(_cells("MoE layer", _sizes_of(row), row) for row in of_layers),
        *(_cells("grouped GEMM and its quantization", f"{m} rows, K {k}, N {n}, {g} experts", row) for row in product),
    ]
    single = f" The grouped GEMM: {_run(product)}, single calls after a pause." if product else ""
    return "\n".join([
        f"On one H200 a layer is {min(ratios):.1f} to {max(ratios):.1f} times as fast as a plain bf16 layer, by size:",
        "",
        *_table(HEAD, cells),
        "",
        f"{_run(of_layers)}. Back-to-back steps, as in training; medians of n samples, both sides alternate in one "
        "run. bf16: a plain layer in PyTorch without fused passes ([source](benchmarks/peers/moe_layer.py)), and "
        f"`torch._grouped_mm`. dB: SQNR of the worst of output and gradients against bf16.{single}",
        *(["", *_of_ranks(of_ranks)] if of_ranks else []),
    ])  # fmt: skip
