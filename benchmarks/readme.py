"""`python -m benchmarks.readme`: write the generated parts of README.md and of docs/: results/performance.md,
results/status.md, results/expert_parallel.md, design/ep_scale.md, design/layer_bytes.md.

results/*.jsonl --newest commit of each op--> tables --> the text between two markers of each document
                                              '-> results/h200_products.svg, h200_ep_scale.svg, headline.svg,
                                                  h200_curves/seeds.svg

A test compares the documents with what this module generates.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

from .figures import ep_scale, speed, status
from .figures.results import newest
from .figures.tables import (
    table_ep,
    table_fsdp,
    table_grouped_gemm,
    table_layer_bytes,
    table_linear,
    table_models,
    table_moe_layer,
    table_ops,
    table_sonic_moe,
)

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- generated: python -m benchmarks.readme -->", "<!-- end of the generated part -->"


def _of_an_op(op: str) -> bool:
    others = table_grouped_gemm.is_product, table_moe_layer.is_layer, table_models.is_model, table_linear.is_linear
    return not any(of_another_table(op) for of_another_table in others)


def performance() -> str:
    """All tables of figures."""
    sections = (
        table_models.table(newest("h200", table_models.is_model)),
        table_moe_layer.table(*(newest(gpu, table_moe_layer.is_layer) for gpu in ("h200", "h100"))),
        table_sonic_moe.table(newest("h200", table_sonic_moe.is_against_sonic)),
        table_fsdp.table(newest("h200_ep", table_fsdp.is_fsdp)),
        table_grouped_gemm.table(newest("h200", table_grouped_gemm.is_product)),
        table_linear.table(newest("h200", table_linear.is_linear)),
        table_ops.table(newest("h200", _of_an_op)),
    )
    return "\n\n".join(section for section in sections if section)


DOCUMENTS: dict[Path, Callable[[], str]] = {
    ROOT / "README.md": lambda: speed.table(newest("h200"), newest("h200_ep", table_ep.is_ep)),
    ROOT / "docs" / "results" / "performance.md": performance,
    ROOT / "docs" / "results" / "status.md": status.tables,
    ROOT / "docs" / "results" / "expert_parallel.md": lambda: table_ep.tables(newest("h200_ep", table_ep.is_ep)),
    ROOT / "docs" / "design" / "ep_scale.md": ep_scale.tables,
    ROOT / "docs" / "design" / "layer_bytes.md": table_layer_bytes.tables,
}


def with_generated(text: str, generated: str) -> str:
    """The text with its generated part replaced. Raises ValueError if a marker is missing."""
    head, rest = text.split(BEGIN)
    _, tail = rest.split(END)
    return f"{head}{BEGIN}\n\n{generated}\n\n{END}{tail}"


if __name__ == "__main__":
    argparse.ArgumentParser("python -m benchmarks.readme", description=__doc__).parse_args()
    for path, generate in DOCUMENTS.items():
        path.write_text(with_generated(path.read_text(), generate()))
    if products := newest("h200", table_grouped_gemm.is_product):
        from .figures.roofline import draw  # needs matplotlib

        draw(products, table_grouped_gemm.PICTURE)
    ep_scale.draw(ep_scale.PICTURE)
    from .figures import headline, seeds  # need matplotlib

    headline.draw(newest("h200"), headline.PICTURE)
    seeds.draw(seeds.runs(), seeds.PICTURE)
