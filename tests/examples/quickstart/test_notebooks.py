"""The repository has no outputs of the notebooks in examples/quickstart; tests/docs/test_pages.py runs their cells."""

import json
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[3] / "examples" / "quickstart"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.ipynb")), ids=lambda path: path.name)
def test_outputs_are_stripped(path: Path) -> None:
    code = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    assert [cell["outputs"] for cell in code] == [[]] * len(code)
    assert {cell["execution_count"] for cell in code} == {None}
