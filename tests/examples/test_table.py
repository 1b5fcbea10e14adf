"""The table of examples/README.md names every program once, and every link resolves."""

import re
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "examples"
TRAIN_ALL = ("training/train_all.py", "`make train`, `make train-gpu`")


def test_the_table_names_every_program() -> None:
    text = (FOLDER / "README.md").read_text()
    links = re.findall(r"\]\(([^)#\s]+)", text)
    assert not [link for link in links if not (FOLDER / link).exists()]
    files = [path for path in FOLDER.glob("*/**/*") if path.suffix in {".py", ".ipynb", ".sbatch"}]
    programs = {p.relative_to(FOLDER) for p in files if p.suffix != ".py" or "__main__" in p.read_text()}
    rows = [line for line in text.splitlines() if line.startswith("| [")]
    first = [re.findall(r"\]\(([^)]+)\)", row.split(" | ")[0]) for row in rows]
    named = [link for links in first for link in links if not link.startswith("..")]
    assert len(named) == len(set(named))
    assert programs == set(map(Path, named))


def test_the_command_of_torchtitan_has_the_experts() -> None:
    """Without the override it trains torchtitan's own."""
    (row,) = [r for r in (FOLDER / "README.md").read_text().splitlines() if r.startswith("| [train_torchtitan")]
    command = row.split(" | ")[1]
    assert "--parallelism.expert_parallel_degree 2" in command
    assert "--override.imports mxep.torch_frontend.integrations.torchtitan.routed_experts`" in command


def test_a_command_names_its_program() -> None:
    rows = [line for line in (FOLDER / "README.md").read_text().splitlines() if line.startswith("| [")]
    for row in rows:
        name, command = re.findall(r"\]\(([^)]+)\)", row)[0], row.split(" | ")[1]
        assert Path(name).stem in command or (name, command) == TRAIN_ALL, row
