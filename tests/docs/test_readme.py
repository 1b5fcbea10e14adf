"""The README and docs/: generated parts are up to date, links resolve, the site lists every page, programs run."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from mxep.core_kernels.registry import OPS

from benchmarks import readme
from benchmarks.figures import speed, status

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = (ROOT / "README.md", *sorted(DOCS.rglob("*.md")), ROOT / "benchmarks" / "results" / "README.md")


@pytest.mark.parametrize("path", readme.DOCUMENTS, ids=lambda path: path.name)
def test_the_generated_parts_are_up_to_date(path: Path) -> None:
    """If this fails: `python -m benchmarks.readme`."""
    text = path.read_text()
    assert readme.with_generated(text, readme.DOCUMENTS[path]()) == text


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 140


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_within_the_repository_resolve(path: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)", path.read_text())
    missing = [link for link in links if "://" not in link and not (path.parent / link).exists()]
    assert not missing


def test_the_status_lists_every_op_once() -> None:
    listed = re.findall(r"^\| \w+ \| `(\w+)`", status.tables(), re.MULTILINE)
    assert sorted(listed) == sorted(OPS)


def test_the_readme_has_the_figures_of_every_size() -> None:
    text = (ROOT / "README.md").read_text()
    assert text.count("\n| MoE layer |") == len(speed.LAYERS)
    assert all(text.count(f"| {how} |") == 1 for how in speed.HOWS.values())


def listed(nav: list[dict[str, Any]]) -> list[str]:
    """The pages of a navigation, in order."""
    entries = [value for entry in nav for value in entry.values()]
    return [page for value in entries for page in ([value] if isinstance(value, str) else listed(value))]


def test_the_site_lists_every_page_once() -> None:
    written = [
        page for page in listed(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]) if (DOCS / page).is_file()
    ]
    assert sorted(written) == sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))


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
