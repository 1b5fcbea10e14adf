"""`python -m benchmarks.readme`: write the README's figures from the recorded lines, between its two markers.

results/cpu.jsonl --newest commit of each op--> tables --> README.md   (a test compares the two)
"""

from pathlib import Path
from typing import Any

from .results import newest

README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- figures: python -m benchmarks.readme -->", "<!-- end of figures -->"
LARGE = 8192  # rows of the shape that the README shows

Row = dict[str, Any]


def kernels(rows: list[Row]) -> str:
    """One line per op: its own time, torch.compile's and a copy's, all of one run."""
    shown = [r for r in rows if r["case"].get("M") == LARGE and r["op"] != "routing"]
    ours = {(r["op"], r["frontend"]): r for r in shown}
    peers = {(r["op"], r["frontend"], r["peer"]): r for r in shown}
    lines = [
        "| op | outputs | mxep, ms | torch.compile, ms | faster by | of a copy's bandwidth |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for (op, frontend), row in ours.items():
        peer = peers[op, frontend, "torch_compile"]
        outputs = "reused" if frontend == "core" else "allocated by each call"
        lines.append(
            f"| `{op}` | {outputs} | {row['us'] / 1e3:.1f} | {peer['peer_us'] / 1e3:.1f} "
            f"| {peer['ratio']:.1f}x | {row['of_roof']:.0%} |"
        )
    return "\n".join(lines)


def step(row: Row) -> str:
    """Where the time of the example's training step goes."""
    kinds = list(row["shares"])
    moved = row["shares"]["quantize"] + row["shares"]["permute"]
    return (
        f"A training step of the example in PyTorch (MXFP8, {row['case']['ranks']} ranks, one core each) takes "
        f"{row['us'] / 1e3:.0f} ms, {row['ratio']:.2f}x the\nspeed of bf16: on a CPU both multiply in fp32. "
        f"Quantize and permute together are {moved:.1%} of it.\n\n"
        f"| {' | '.join(kinds)} |\n|{' --- |' * len(kinds)}\n"
        f"| {' | '.join(f'{share:.1%}' for share in row['shares'].values())} |"
    )


def figures() -> str:
    """The markdown between the markers."""
    rows = newest("cpu")
    (train,) = (r for r in rows if r["op"] == "train_step")
    first = rows[0]
    versions = ", ".join(f"{name} {version}" for name, version in first["versions"].items())
    case = f"{LARGE} x 4096 bf16, {first['case']['threads']} threads on both sides, medians of one run, exact bytes"
    return f"{first['hardware']}, {versions}. {case}.\n\n{kernels(rows)}\n\n{step(train)}"


def with_figures(text: str) -> str:
    """The README's text with its figures replaced. Raises ValueError if a marker is missing."""
    head, rest = text.split(BEGIN)
    _, tail = rest.split(END)
    return f"{head}{BEGIN}\n\n{figures()}\n\n{END}{tail}"


if __name__ == "__main__":
    README.write_text(with_figures(README.read_text()))
