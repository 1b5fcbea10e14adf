"""Both frontends export the same few names; docs/guides/frontends.md lists the exceptions."""

import ast
import re
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
from mxep import jax_frontend, torch_frontend
from mxep.core_kernels.policy.swiglu_gradient import PARTS
from mxep.core_kernels.registry import OPS

from ..public_names import importable, modules_of_names, public_names

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "guides" / "frontends.md"
MOST_NAMES = {torch_frontend: 37, jax_frontend: 33}
frontends = pytest.mark.parametrize("frontend", [torch_frontend, jax_frontend], ids=lambda frontend: frontend.__name__)


def test_the_page_lists_names_that_only_one_frontend_exports() -> None:
    text = PAGE.read_text()
    only_one = importable(torch_frontend).keys() ^ importable(jax_frontend).keys()
    assert only_one
    assert not {name for name in only_one if f"`{name}`" not in text}


def test_the_changelog_counts_them() -> None:
    numbers = (len(public_names(frontend)) for frontend in (torch_frontend, jax_frontend))
    assert "{} public names in PyTorch and {} in JAX".format(*numbers) in (ROOT / "CHANGELOG.md").read_text()


@frontends
def test_every_exported_name_exists(frontend: ModuleType) -> None:
    assert not [name for name in public_names(frontend) if not hasattr(frontend, name)]


@frontends
def test_the_names_are_few_and_dir_lists_them(frontend: ModuleType) -> None:
    assert len(frontend.__all__) <= MOST_NAMES[frontend]
    assert sorted(frontend.__all__) == dir(frontend)


@frontends
def test_the_docstring_has_a_table_of_the_names(frontend: ModuleType) -> None:
    """It is the first screen of help(), which then documents every name."""
    doc = frontend.__doc__ or ""
    table = doc.split("\n\n")[1]
    names = ", ".join(re.sub(r" \([^)]*\)", "", line[15:]) for line in table.splitlines())
    assert sorted(names.split(", ")) == sorted(frontend.__all__)
    assert len(doc.splitlines()) <= 40


@frontends
def test_an_import_of_all_names(frontend: ModuleType) -> None:
    found: dict[str, object] = {}
    exec(f"from {frontend.__name__} import *", found)
    assert found.keys() - {"__builtins__"} == public_names(frontend)


@frontends
def test_a_name_that_is_elsewhere_says_where(frontend: ModuleType) -> None:
    names = modules_of_names(frontend)
    assert not names.keys() & public_names(frontend)
    for name in names:
        with pytest.raises(AttributeError, match="import it from ") as raised:
            getattr(frontend, name)
        module = str(raised.value).rpartition(" ")[2]
        assert hasattr(import_module(module), name), (name, module)


@frontends
def test_a_name_that_is_nowhere(frontend: ModuleType) -> None:
    with pytest.raises(AttributeError, match=f"module '{frontend.__name__}' has no attribute 'group_mm'"):
        _ = frontend.group_mm


def called(folder: str) -> set[str]:
    """Names that the functions of a frontend read from its ops."""
    trees = [ast.parse(path.read_text()) for path in (ROOT / folder).rglob("*.py")]
    attributes = (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    return {node.attr for node in attributes if ast.unparse(node.value) == "ops"}


def test_an_op_that_no_function_calls_says_so_and_what_it_is_for() -> None:
    used = called("torch_frontend") | called("jax_frontend")
    used |= {part.name for op in OPS.values() if op.compose for part in op.parts} | set(PARTS)
    assert {name for name in OPS if name not in used} == {
        name for name, op in OPS.items() if "No function of mxep calls this op." in op.doc
    }
