"""Public signatures: few arguments, few names, and one router for both frontends."""

import inspect
import pickle
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import jax
import pytest
from mxep import jax_frontend, torch_frontend

MOST_ARGUMENTS = 12
MOST_NAMES = {torch_frontend: 42, jax_frontend: 36}
FRONTENDS = pytest.mark.parametrize("frontend", [torch_frontend, jax_frontend], ids=["torch", "jax"])


def calls(name: str, value: Any, home: str) -> Iterator[tuple[str, Any]]:
    """The functions of a public value by name: itself, the functions of a module, the methods of a class. home: the
    package whose functions count."""
    if isinstance(value, ModuleType):
        for inner, found in vars(value).items():
            if not inner.startswith("_") and (inspect.isfunction(found) or hasattr(found, "__signature__")):
                yield f"{name}.{inner}", found
    elif inspect.isclass(value):
        yield name, value
        for inner in dir(value):
            method = inspect.getattr_static(value, inner)
            method = method.__func__ if isinstance(method, classmethod | staticmethod) else method
            if inspect.isfunction(method) and not inner.startswith("_") and method.__module__.startswith(home):
                yield f"{name}.{inner}", method
    elif callable(value):
        yield name, value


@FRONTENDS
def test_a_public_call_has_few_arguments(frontend: ModuleType) -> None:
    numbers = {}
    for name in frontend.__all__:
        for called, function in calls(name, getattr(frontend, name), "mxep."):
            parameters = inspect.signature(function).parameters
            numbers[called] = len([p for p in parameters if p not in ("self", "cls")])
    layer = "MoE" if frontend is torch_frontend else "MoEConfig"
    assert {layer, "MoEStats.metrics", "ops.quantize_row", "grouped_swiglu_ffn"} <= numbers.keys()
    assert {name: n for name, n in numbers.items() if n > MOST_ARGUMENTS} == {}


@FRONTENDS
def test_the_package_has_few_names(frontend: ModuleType) -> None:
    assert len(frontend.__all__) <= MOST_NAMES[frontend]
    assert not set(frontend.__all__) & {"MXFP8ExpertParallel", "moe_metrics", "Rounding"}


def test_another_name_of_the_style() -> None:
    assert torch_frontend.MXFP8ExpertParallel is torch_frontend.ExpertParallel


def test_the_frontends_have_one_router() -> None:
    """It pickles, it is hashable, and `jax.jit` takes it as a static argument that nobody declares."""
    assert torch_frontend.RouterConfig is jax_frontend.RouterConfig
    assert torch_frontend.SharedExpert is jax_frontend.SharedExpert
    for value in (jax_frontend.RouterConfig(2, score_func="sigmoid"), jax_frontend.SharedExpert(64, gate=True)):
        assert pickle.loads(pickle.dumps(value)) == value
        assert len({value, pickle.loads(pickle.dumps(value))}) == 1
        assert jax.jit(lambda same: {"static": same, "x": 1.0})(value)["static"] == value
