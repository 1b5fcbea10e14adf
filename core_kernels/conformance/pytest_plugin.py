"""The cases as tests of pytest. In a test file of another library:

from mxep.core_kernels.conformance.pytest_plugin import test_case

pytest -p mxep.core_kernels.conformance.pytest_plugin --mxep-backend my_package.backend tests/test_mxep.py
"""

import pytest

from .backend import LackingError, load
from .cases import CONFORMANCE
from .check import Definition
from .runner import Runner

__all__ = ["compare", "test_case"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--mxep-backend", action="append", metavar="MODULE", help="a backend of mxep.conformance; several are allowed"
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every case of the ops that a backend has."""
    if metafunc.function is not test_case:
        return
    names = metafunc.config.getoption("--mxep-backend")
    if not names:
        raise pytest.UsageError("--mxep-backend: got none; name the module of a backend")
    ops = {backend: load(backend).ops for backend in names}
    offered = [(backend, name) for name, case in CONFORMANCE.items() for backend in names if case.op in ops[backend]]
    metafunc.parametrize(("backend", "name"), offered)


@pytest.fixture(scope="session")
def mxep_runners() -> dict[str, Runner]:
    """The runners of a session, by backend: a runner detects the mode of a function once."""
    return {}


def test_case(backend: str, name: str, mxep_runners: dict[str, Runner]) -> None:
    if backend not in mxep_runners:
        mxep_runners[backend] = Runner(load(backend))
    compare(mxep_runners[backend], Definition(CONFORMANCE[name]))


def compare(runner: Runner, of: Definition) -> None:
    """Fail unless a backend's outputs are as defined; skip a call that it lacks."""
    try:
        got = runner.outputs(of)
    except LackingError as error:
        pytest.skip(str(error))
    message = ""
    try:
        runner.require(of, got)
    except AssertionError as error:
        message = str(error)
    if message:
        pytest.fail(message, pytrace=False)
