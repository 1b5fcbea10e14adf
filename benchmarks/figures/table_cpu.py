"""The table of the C++ ops on a CPU, and the profile of a training step."""

from typing import Any

Row = dict[str, Any]


def _kernels(rows: list[Row]) -> str:
    """One row per op, shape and kind of call.

    A peer that reuses its outputs cannot be slower than one that allocates them: a row with reused outputs shows the
    faster of the peer's two times.
    """
    shown = [r for r in rows if r["op"] not in ("routing", "train_step")]
    compiled = {(r["op"], r["case"]["M"], r["frontend"]): r["peer_us"] for r in shown if r["peer"] == "torch_compile"}
    ours = {(r["op"], r["case"]["M"], r["frontend"]): r for r in shown}
    lines = [
        "| op | shape | outputs | ours, ms (spread) | torch.compile, ms | speed-up | of a copy's bandwidth |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for (op, m, frontend), row in ours.items():
        peer_us = min(compiled[op, m, frontend], compiled[op, m, "torch"])
        outputs = "reused" if frontend == "core" else "allocated by each call"
        lines.append(
            f"| `{op}` | {m} x {row['case']['K']} | {outputs} | {row['us'] / 1e3:.2f} ({row['spread']:.0%}) "
            f"| {peer_us / 1e3:.2f} | {peer_us / row['us']:.1f}x | {row['of_roof']:.0%} |"
        )
    return "\n".join(lines)


def _step(row: Row) -> str:
    """The shares of the example's training step."""
    kinds = list(row["shares"])
    moved = row["shares"]["quantize"] + row["shares"]["permute"]
    return (
        f"A training step of the example in PyTorch (MXFP8, {row['case']['ranks']} ranks, one core each) takes "
        f"{row['us'] / 1e3:.0f} ms, {row['ratio']:.2f}x the speed of bf16: on a CPU both multiply in fp32. "
        f"Quantize and permute (with combine) are {moved:.1%} of the step. SwiGLU includes the quantization of its "
        f"output.\n\n"
        f"| {' | '.join(kinds)} |\n|{' --- |' * len(kinds)}\n"
        f"| {' | '.join(f'{share:.1%}' for share in row['shares'].values())} |"
    )


def table(rows: list[Row]) -> str:
    """The section of the CPU."""
    (train,) = (r for r in rows if r["op"] == "train_step")
    first = rows[0]
    versions = ", ".join(f"{name} {version}" for name, version in first["versions"].items())
    return (
        "## Ops, on a CPU\n\n"
        f"{first['hardware']}, {versions}, commit {first['commit'][:7]}; bf16, {first['case']['threads']} threads on "
        "both sides. Times are medians of one run, spread is (p90 - p10) / median. The outputs are compared byte for "
        "byte before timing. The peer is the same formula under `torch.compile`, with outputs as ours. "
        f"The copy reuses its output.\n\n{_kernels(rows)}\n\n{_step(train)}"
    )
