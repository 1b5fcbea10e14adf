"""Adds the repository's root to sys.path: the examples are scripts outside the package."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
