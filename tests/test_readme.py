"""The README and docs/: generated parts are up to date, links resolve, every page is in the index, programs run."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from mxep.core_kernels.registry import OPS

from benchmarks import readme
from benchmarks.figures import speed, status

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "benchmarks" / "results" / "README.md")


@pytest.mark.parametrize("path", readme.DOCUMENTS, ids=lambda path: path.name)
def test_the_generated_parts_are_up_to_date(path: Path) -> None:
    """If this fails: `python -m benchmarks.readme`."""
    text = path.read_text()
    assert readme.with_generated(text, readme.DOCUMENTS[path]()) == text


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_within_the_repository_resolve(path: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)", path.read_text())
    missing = [link for link in links if "://" not in link and not (path.parent / link).exists()]
    assert not missing


def test_the_status_lists_every_op_once() -> None:
    listed = re.findall(r"^\| \w+ \| `(\w+)`", status.tables(), re.MULTILINE)
    assert sorted(listed) == sorted(OPS)


def test_the_table_of_speed_has_one_row_per_comparison() -> None:
    layer = dict(zip(("tokens", "dim", "hidden_dim", "num_experts", "top_k"), speed.LAYERS[0], strict=True))
    line = {"peer_us": 3000.0, "us": 2000.0, "ratio": 1.5, "n": 10, "spread": 0.0, "hardware": "1x GPU",
            "commit": "a" * 40, "date": "2026-11-26", "error": {"sqnr_db": 22.7}, "frontend": "torch",
            "peak_nbytes": 2**30, "peer_peak_nbytes": 3 * 2**30}  # fmt: skip
    plain, product = "plain_torch_bf16", "torch_grouped_mm_bf16"
    mx, clock = {"recipe": "mxfp8"}, {"clock": "in a row"}
    measured = [
        line | {"op": op, "peer": peer, "case": case}
        for op, peer, case in (
            ("grouped_mm_autograd", product, {**speed.PRODUCT, "implementation": "cuda"}),
            ("grouped_mm_autograd", product, {**speed.PRODUCT, "weights": "held", "implementation": "cuda"}),
            ("moe_layer_fwd_bwd", plain, {**layer, **mx}),  # a single step
            ("moe_layer_fwd_bwd", plain, {**layer, **mx, **clock}),
            ("moe_layer_fwd_bwd", plain, {**layer, **mx, **clock, "weights": "held"}),
            ("moe_layer_fwd_bwd", plain, {**layer, **mx, **clock, "launch": "graph"}),
        )
    ]
    measured[0] |= {"peer_peak_nbytes": None}
    measured[3] |= {"us": 1500.0, "ratio": 2.0}
    ranks = {**layer, **mx, "ranks": 4, "routing": "balanced"}
    parallel = [
        line | {"op": "ep_layer_fwd_bwd", "peer": "bf16", "case": ranks | more, "hardware": "4x GPU"}
        for more in ({"how": "copy engines"}, {"how": "copy engines", "ranks": 2}, {"how": "bf16 wire"}, {"how": "jit"})
    ]
    text = speed.table(measured, parallel)
    sizes = "16384, 7168, 2048, 32, 8"
    assert [
        row for row in text.splitlines() if row.startswith("| ") and "bf16, ms" not in row and "---" not in row
    ] == [
        f"| MoE layer | {sizes} | 3.0 | 1.5 | 2.00x | 22.7 | 3.0 / 1.0 | 10 |",
        "| grouped GEMM and its quantization | 131072 rows, K 7168, N 2048, 8 experts | 3.0 | 2.0 | 1.50x | 22.7 | "
        " | 10 |",
        f"| {sizes} | 3.0 | 2.0 (1.50x) | 22.7 | 10 |",
    ]
    assert text.startswith("On one H200 a layer is 2.0 to 2.0 times as fast")
    assert "1x GPU, commit aaaaaaa of 2026-11-26" in text
    assert "4x GPU, commit aaaaaaa of 2026-11-26" in text
    assert f"recipe `bf16`: {sizes}: 2.0 (1.50x) by all-to-all (n 10)." in text


def test_the_readme_has_the_figures_of_every_size() -> None:
    text = (ROOT / "README.md").read_text()
    assert text.count("\n| MoE layer |") == len(speed.LAYERS)
    assert all(text.count(f"| {how} |") == 1 for how in speed.HOWS.values())


def test_the_index_lists_every_page() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    assert not [path.name for path in (ROOT / "docs").glob("*.md") if f"({path.name})" not in index + "(index.md)"]


@pytest.mark.parametrize(
    ("block", "launcher"),
    [(0, []), (1, ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]), (2, [])],
    ids=["GPU", "torch", "jax"],
)
def test_the_programs_run(block: int, launcher: list[str], tmp_path: Path) -> None:
    program, text = (
        tmp_path / "program.py",
        re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL),
    )
    # A thread of Gloo frees the tensors of the last collective a moment after it. On a busy machine Python may end
    # first, and torch aborts (examples/ranks.py).
    # The program for a GPU runs on a CPU here, with a small layer.
    source = text[block].replace('"cuda"', '"cpu"').replace("16384, 2048, 768, 128", "64, 64, 32, 8")
    assert "cuda" not in source
    program.write_text(f"{source}\nimport time\ntime.sleep(2)\n")
    run = subprocess.run([sys.executable, *launcher, str(program)], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr


def test_every_file_that_contributing_names_exists() -> None:
    named = re.findall(r"`((?:\w+/)+\w+\.\w+)`", (ROOT / "CONTRIBUTING.md").read_text())
    assert len(named) > 30
    assert [path for path in named if not (ROOT / path).exists()] == []
