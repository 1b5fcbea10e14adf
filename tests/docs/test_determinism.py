"""docs/determinism.md: every sentence is a row that names tests, and every named test exists."""

import ast
import re
from functools import cache

import pytest
import yaml

from ..test_imports import ROOT

PAGE = (ROOT / "docs" / "determinism.md").read_text()
WITHOUT_CODE = re.sub(r"^```.*?^```$", "", PAGE, flags=re.MULTILINE | re.DOTALL)
ROWS = [line for line in re.findall(r"^\| .*", WITHOUT_CODE, re.MULTILINE) if not re.search(r"---|\| tests \|", line)]
TEST = re.compile(r"`([\w/]+\.py)::(\w+)`")


@cache
def names_in(file: str) -> set[str]:
    tree = ast.parse((ROOT / "tests" / file).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[2:60])
def test_a_row_names_tests_that_exist(row: str) -> None:
    contract, tests = row.strip("| ").rsplit(" | ", 1)
    named = TEST.findall(tests)
    assert named
    assert re.sub(TEST, "", tests).replace(",", "").strip() == "", tests
    assert all(name.startswith("test_") and name in names_in(file) for file, name in named), tests
    assert contract.endswith(".")
    for sentence in re.split(r"(?<=\.) (?=[A-Z`])", contract):
        assert len(sentence.split()) <= 25, sentence


def test_there_is_no_contract_outside_of_the_rows() -> None:
    """A section has at most a line before its table, of what the table compares."""
    assert len(ROWS) > 30
    assert len(PAGE.splitlines()) <= 200
    for section in WITHOUT_CODE.split("\n## ")[1:]:
        title, _, text = section.partition("\n")
        before, _, after = text.partition("\n| contract | tests |\n")
        assert len(before.split()) <= 25, title
        prose = [line for line in after.splitlines() if line and not line.startswith("|")]
        assert len(prose) <= 2 * (title == "Rollout"), (title, prose)


def test_the_site_lists_the_page() -> None:
    assert "determinism.md" in yaml.dump(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
