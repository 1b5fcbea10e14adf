"""One fixture per backend; and what a process in interpreter mode leaves to the other one."""

from collections.abc import Callable, Mapping

import pytest

from . import backends

# No Triton in these: the normal process runs them.
collect_ignore = (
    ["test_references.py", "test_oracle.py", "test_swiglu_oracle.py", "test_end_to_end.py", "test_expert_parallel.py"]
    if backends.INTERPRETER
    else []
)


@pytest.fixture(params=backends.NAMES)
def backend(request: pytest.FixtureRequest) -> str:
    """The name of the backend under test."""
    return request.param


@pytest.fixture
def ops(backend: str) -> Mapping[str, Callable]:
    """The backend's ops by name."""
    return backends.ops(backend)
