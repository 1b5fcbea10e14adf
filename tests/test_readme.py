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
    measured = [
        {"op": op, "frontend": frontend, "peer": peer, "peer_us": 3000.0, "us": 2000.0, "ratio": 1.5,
         "case": {**(speed.LAYER if op.startswith("moe") else speed.SHAPE), **more, "implementation": "cuda"},
         "hardware": "1x GPU", "versions": {"torch": "2", "jax": "0"}}
        for op, frontend, peer, more in (
            ("grouped_mm_fwd", "torch", "torch_grouped_mm_bf16", {}),
            ("grouped_mm_fwd", "torch", "copy", {}),
            ("moe_layer_fwd_bwd", "torch", "plain_torch_bf16", {"recipe": "mxfp8"}),
            ("moe_layer_fwd_bwd", "torch", "plain_torch_bf16", {"recipe": "mxfp8", "weights": "held"}),
        )
    ]  # fmt: skip
    text = speed.table(measured)
    assert text.count("1.50x") == 2
    assert "| Grouped GEMM, forward | 3.0 ms, `torch._grouped_mm` | 2.0 ms | 1.50x |" in text


def test_the_index_lists_every_page() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    assert not [path.name for path in (ROOT / "docs").glob("*.md") if f"({path.name})" not in index + "(index.md)"]


@pytest.mark.parametrize(
    ("block", "launcher"),
    [(0, ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]), (1, [])],
    ids=["torch", "jax"],
)
def test_the_programs_run(block: int, launcher: list[str], tmp_path: Path) -> None:
    program, text = (
        tmp_path / "program.py",
        re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL),
    )
    # A thread of Gloo frees the tensors of the last collective a moment after it. On a busy machine Python may end
    # first, and torch aborts (examples/ranks.py).
    program.write_text(f"{text[block]}\nimport time\ntime.sleep(2)\n")
    run = subprocess.run([sys.executable, *launcher, str(program)], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr


def test_every_file_that_contributing_names_exists() -> None:
    named = re.findall(r"`((?:\w+/)+\w+\.\w+)`", (ROOT / "CONTRIBUTING.md").read_text())
    assert len(named) > 30
    assert [path for path in named if not (ROOT / path).exists()] == []
