"""The table of examples/README.md names every program once, and every link resolves."""

import re
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "examples"


def test_the_table_names_every_program() -> None:
    text = (FOLDER / "README.md").read_text()
    links = re.findall(r"\]\(([^)#\s]+)", text)
    assert not [link for link in links if not (FOLDER / link).exists()]
    inside = {
        str(path.relative_to(FOLDER)) for path in FOLDER.glob("*/**/*") if path.suffix in {".py", ".ipynb", ".sbatch"}
    }
    programs = {path.name for path in FOLDER.glob("*.py") if 'PROG = "' in path.read_text()}
    rows = [line for line in text.splitlines() if line.startswith("| [")]
    first = [re.findall(r"\]\(([^)]+)\)", row.split(" | ")[0]) for row in rows]
    named = [link for links in first for link in links if not link.startswith("..")]
    assert len(named) == len(set(named))
    assert inside | programs <= set(named)


def test_a_command_names_its_program() -> None:
    rows = [line for line in (FOLDER / "README.md").read_text().splitlines() if line.startswith("| [")]
    for row in rows:
        name, command = re.findall(r"\]\(([^)]+)\)", row)[0], row.split(" | ")[1]
        assert Path(name).stem in command or "make train" in command, row
