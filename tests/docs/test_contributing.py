"""Every file that CONTRIBUTING names exists."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_files_that_contributing_names_exist() -> None:
    named = re.findall(r"`([\w/]+/[\w./]+\.\w+)`", (ROOT / "CONTRIBUTING.md").read_text())
    assert len(named) > 20
    assert not [path for path in named if not (ROOT / path).exists()]
