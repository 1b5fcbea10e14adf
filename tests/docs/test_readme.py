"""The README and docs/: generated parts are up to date, links resolve, the site lists every page."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from mxep.core_kernels.registry import OPS

from benchmarks import readme
from benchmarks.cases.shapes import H200
from benchmarks.figures import headline, results, seeds, speed, status
from benchmarks.figures.tables import table_ep

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


def test_the_readme_has_every_headline_with_its_commit_and_the_range_over_all_sizes() -> None:
    text = (ROOT / "README.md").read_text()
    layers = results.newest("h200")
    found = list(speed.headlines(layers, results.newest("h200_ep", table_ep.is_ep)))
    assert len(speed.layers(layers)) == len(H200.moe_layers)
    assert {headline.what.split(", ", 1)[1] for headline in found if "GPUs" in headline.what} == {*speed.HOWS.values()}
    for what, rows, _ in found:
        (line,) = re.findall(rf"^\| {re.escape(what)}, ms \|.*", text, re.MULTILINE)
        assert all(row["commit"][:7] in line and row["date"] in line for row in rows)


@pytest.mark.parametrize("chart", [headline, seeds], ids=["headline", "seeds"])
def test_the_charts_are_up_to_date(chart: Any, tmp_path: Path) -> None:
    """If this fails: `python -m benchmarks.readme`."""
    rows = results.newest("h200") if chart is headline else seeds.runs()
    drawn = tmp_path / "drawn.svg"
    chart.draw(rows, drawn)
    assert drawn.read_bytes() == chart.PICTURE.read_bytes()


def test_the_fastest_bf16_peer_of_a_run_is_the_best_bf16() -> None:
    """Of two runs, only the lines of the layer's own count."""
    (layer,) = [
        row for row in speed.layers(results.newest("h200")) if speed.sizes_of(row["case"]) == H200.moe_layers[0]
    ]
    other = {**layer, "peer": "recipe_bf16", "peer_us": layer["peer_us"] / 2}
    other |= {"peer_peak_nbytes": 2**30, "peer_joules": 30.0}
    older = {**other, "commit": "0" * 40, "peer_us": 1.0}
    sides = headline.sides(layer, [layer, other, older])
    assert sides["best bf16"] == headline.Side(layer["peer_us"] / 2e3, 1.0, 30.0)
    assert "best bf16" not in headline.sides(layer, [layer, older])
    assert "| MoE layer, best bf16, ms |" in speed.table([layer, other], [])
    assert "best bf16, ms" not in speed.table([layer, older], [])


def listed(nav: list[dict[str, Any]]) -> list[str]:
    """The pages of a navigation, in order."""
    entries = [value for entry in nav for value in entry.values()]
    return [page for value in entries for page in ([value] if isinstance(value, str) else listed(value))]


def test_the_site_lists_every_page_once() -> None:
    written = [
        page for page in listed(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]) if (DOCS / page).is_file()
    ]
    assert sorted(written) == sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))
