"""The README's figures are the recorded ones."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_figures_come_from_the_recorded_lines() -> None:
    """If this fails: `python -m benchmarks.readme`."""
    sys.path.insert(0, str(ROOT))
    try:
        from benchmarks import readme
    finally:
        sys.path.remove(str(ROOT))
    text = readme.README.read_text()
    assert readme.with_figures(text) == text
