"""The table of the MoE layer against SonicMoE: a row per size."""

from typing import Any

from .table_moe_layer import PLAIN, RECIPE_BF16
from .table_ops import machine

Row = dict[str, Any]
SONIC = "sonic_moe"
COLUMNS = ("tokens, D, F, experts, k", "ms: plain bf16 / recipe `bf16` / SonicMoE / mxep (n, spread)",
           "SonicMoE / mxep", "SonicMoE / recipe `bf16`", "joules of a step: SonicMoE / mxep",
           "peak memory, GiB: SonicMoE / mxep", "dB: SonicMoE / mxep")  # fmt: skip


def is_against_sonic(op: str) -> bool:
    return op == "sonic_moe_fwd_bwd"


def _sizes(row: Row) -> str:
    return ", ".join(str(row["case"][name]) for name in ("tokens", "dim", "hidden_dim", "num_experts", "top_k"))


def _both(row: Row, name: str, unit: float) -> str:
    """The peer's amount and ours; "" where one was not measured."""
    amounts = row.get(f"peer_{name}"), row.get(name)
    return " / ".join(f"{amount / unit:.1f}" for amount in amounts if amount) if all(amounts) else ""


def _cells(by_peer: dict[str, Row]) -> tuple[str, ...]:
    row = by_peer[SONIC]
    ms = [by_peer[peer]["peer_us"] / 1e3 for peer in (PLAIN, RECIPE_BF16, SONIC)]
    return (
        _sizes(row),
        f"{' / '.join(f'{t:.2f}' for t in (*ms, row['us'] / 1e3))} ({row['n']}, {row['spread']:.0%})",
        f"{row['ratio']:.2f}x",
        f"{row['peer_us'] / by_peer[RECIPE_BF16]['peer_us']:.2f}x",
        _both(row, "joules", 1),
        _both(row, "peak_nbytes", 2**30),
        f"{row['error']['sonic_moe_sqnr_db']} / {row['error']['sqnr_db']}",
    )


def table(rows: list[Row]) -> str:
    """The section; "" without lines."""
    if not rows:
        return ""
    groups: dict[str, dict[str, Row]] = {}
    for row in rows:
        groups.setdefault(_sizes(row), {})[row["peer"]] = row
    case = rows[0]["case"]
    return "\n".join([
        "## The MoE layer against SonicMoE",
        "",
        f"{machine(rows)}, sonic-moe {case['sonic_moe']}, recipe `{case['recipe']}`. Forward and backward in PyTorch, "
        "back-to-back steps, all four layers in the same rounds.",
        "",
        "- *SonicMoE*: its layer in bf16 with its router, which also computes its logits in bf16 "
        f"([source](../../benchmarks/peers/sonic_moe.py)). Its kernels were chosen from {case['configurations']}; its "
        "own search compiles tens.",
        "- *dB*: SQNR of the worst of y and all gradients against bf16, each with its own choice of experts.",
        "",
        f"| {' | '.join(COLUMNS)} |",
        f"|{' --- |' * len(COLUMNS)}",
        *(f"| {' | '.join(_cells(of_one))} |" for of_one in groups.values()),
    ])  # fmt: skip
