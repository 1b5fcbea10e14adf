"""The examples are scripts beside the package: tests import and start them from the repository's root."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
