"""Run a module with another build of the extension: python -m tests.sanitize EXTENSION MODULE [ARGUMENTS]."""

import importlib.util
import runpy
import sys
from pathlib import Path

NAME = "mxep.cpp_bindings._ops"


def load(path: Path) -> None:
    """Import the file as the extension of mxep, whose own is then never loaded."""
    spec = importlib.util.spec_from_file_location(NAME, path)
    assert spec is not None, path
    assert spec.loader is not None, path
    module = sys.modules[NAME] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


if __name__ == "__main__":
    load(Path(sys.argv[1]).resolve())
    del sys.argv[:2]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
