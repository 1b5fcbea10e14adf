"""Plugin of pytest for tests/checks/coverage.sh: gcov's counts are written when the tests of a process end.

gcov writes them when the process exits, but pytest-xdist kills a worker that takes ten seconds for that.
"""

import ctypes
import sys

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish() -> None:
    extension = sys.modules.get("mxep.cpp_bindings._ops")
    if extension:
        ctypes.CDLL(extension.__file__).__gcov_dump()
