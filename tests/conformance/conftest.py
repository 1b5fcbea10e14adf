"""The option --backend, the fixture of an adapter, and which tests run with it."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from . import backends, cases

WITHOUT_ADAPTER = (
    *("test_adapter.py", "test_check.py", "test_oracle.py", "test_oracle_sm90.py", "test_references.py"),
    *("test_mutants_of_products.py", "test_runner.py", "test_swiglu_oracle.py"),
)
"""Tests of the definition and of the suite itself."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--backend",
        action="append",
        help="adapter of tests/conformance: oracle, cpp, triton, torch, jax or a module's name",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "needs(*names): ops and functions that an adapter has to offer for the test")
    config.addinivalue_line("markers", "composed(op): no Triton kernel of its own; it runs the kernels of other ops")
    for name in config.getoption("backend", None) or ():
        try:
            backends.loaded(name)
        except (TypeError, ValueError) as error:  # of functions that are no ops, or of wrong claims
            raise pytest.UsageError(f"--backend {name}: {error}") from None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Tests without an adapter run in the normal process alone, and not with the option."""
    if Path(__file__).parent not in collection_path.parents or collection_path.name not in WITHOUT_ADAPTER:
        return None
    return True if config.getoption("backend", None) or backends.INTERPRETER else None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "backend" in metafunc.fixturenames:
        names = metafunc.config.getoption("backend", None) or backends.DEFAULT
        if metafunc.function.__name__ == "test_case":
            cases.parametrize(metafunc, names, metafunc.module.CASES)
        else:
            metafunc.parametrize("backend", names, scope="module")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests of ops that an adapter lacks. In Triton's interpreter an op that is composed of others
    runs one case of each test: the others have their own cases there.
    """
    composed = set()

    def runs(item: pytest.Item) -> bool:
        if backends.INTERPRETER and (mark := item.get_closest_marker("composed")):
            test = item.function, mark.args  # type: ignore[attr-defined]
            if test in composed:
                return False
            composed.add(test)
        needed = [name for mark in item.iter_markers("needs") for name in mark.args]
        return all(backends.offers(item.callspec.params["backend"], name) for name in needed)  # type: ignore[attr-defined]

    def repeats_a_rounding(item: pytest.Item) -> bool:
        """A product in bf16 is the fp32 product, rounded: after the first case of a test."""
        if item.path.parent.name not in ("grouped_gemm", "layer") or not hasattr(item, "callspec"):
            return False
        if item.callspec.params.get("out_dtype") != "bfloat16":
            return False
        test = item.function, item.callspec.params.get("backend")  # type: ignore[attr-defined]
        repeated = test in rounded
        rounded.add(test)
        return repeated

    rounded: set[tuple] = set()
    for item in items:
        if repeats_a_rounding(item):
            item.add_marker(pytest.mark.slow)
    chosen = [(item, runs(item)) for item in items]
    config.hook.pytest_deselected(items=[item for item, kept in chosen if not kept])
    items[:] = [item for item, kept in chosen if kept]


@pytest.fixture(scope="module")
def ops(backend: str) -> Mapping[str, Callable]:
    """The ops of the adapter by name."""
    return backends.Ops(backend)
