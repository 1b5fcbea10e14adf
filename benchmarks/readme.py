"""`python -m benchmarks.readme`: write the README's figures from the recorded lines, between its two markers.

results/cpu.jsonl, h200.jsonl --newest commit of each op--> tables --> README.md   (a test compares the two)
                                                            '-> roofline.py's picture, if there are products
"""

from pathlib import Path
from typing import Any

from .readme_gpu import gpu
from .readme_products import PICTURE, is_product, products
from .results import newest

README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- figures: python -m benchmarks.readme -->", "<!-- end of figures -->"

Row = dict[str, Any]


def kernels(rows: list[Row]) -> str:
    """One line per op, shape and way to call it. Reusing its outputs cannot make a peer slower than allocating
    them: beside ours with reused outputs stands the faster of the peer's two times."""
    shown = [r for r in rows if r["op"] not in ("routing", "train_step")]
    compiled = {(r["op"], r["case"]["M"], r["frontend"]): r["peer_us"] for r in shown if r["peer"] == "torch_compile"}
    ours = {(r["op"], r["case"]["M"], r["frontend"]): r for r in shown}
    lines = [
        "| op | shape | outputs | mxep, ms (spread) | torch.compile, ms | faster by | of a copy's bandwidth |",
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


def step(row: Row) -> str:
    """Where the time of the example's training step goes."""
    kinds = list(row["shares"])
    moved = row["shares"]["quantize"] + row["shares"]["permute"]
    return (
        f"A training step of the example in PyTorch (MXFP8, {row['case']['ranks']} ranks, one core each) takes "
        f"{row['us'] / 1e3:.0f} ms, {row['ratio']:.2f}x the\nspeed of bf16: on a CPU both multiply in fp32. "
        f"Quantize and permute (with the combine) together are {moved:.1%} of it; SwiGLU, which quantizes what it "
        f"makes, is a column of its own.\n\n"
        f"| {' | '.join(kinds)} |\n|{' --- |' * len(kinds)}\n"
        f"| {' | '.join(f'{share:.1%}' for share in row['shares'].values())} |"
    )


def figures() -> str:
    """The markdown between the markers."""
    on_gpu = newest("h200", lambda op: not is_product(op))
    sections = (gpu(on_gpu) if on_gpu else "", products(newest("h200", is_product)), cpu())
    return "\n\n".join(section for section in sections if section)


def cpu() -> str:
    rows = newest("cpu")
    (train,) = (r for r in rows if r["op"] == "train_step")
    first = rows[0]
    versions = ", ".join(f"{name} {version}" for name, version in first["versions"].items())
    case = (
        f"bf16, {first['case']['threads']} threads on both sides, medians of one run, spread (p90 - p10) / median, "
        f"exact bytes checked before timing.\nThe peer is the same formula under torch.compile, its outputs reused or "
        f"allocated like ours. The copy reuses its output."
    )
    return f"{first['hardware']}, {versions}; {case}\n\n{kernels(rows)}\n\n{step(train)}"


def with_figures(text: str) -> str:
    """The README's text with its figures replaced. Raises ValueError if a marker is missing."""
    head, rest = text.split(BEGIN)
    _, tail = rest.split(END)
    return f"{head}{BEGIN}\n\n{figures()}\n\n{END}{tail}"


if __name__ == "__main__":
    README.write_text(with_figures(README.read_text()))
    if on_gpu := newest("h200", is_product):
        from .roofline import draw  # matplotlib is for who has products to draw

        draw(on_gpu, PICTURE)
