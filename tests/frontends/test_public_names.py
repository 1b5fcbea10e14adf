"""Both frontends export the same names; docs/frontends.md lists the exceptions."""

import ast
import pydoc
from pathlib import Path
from types import ModuleType

import pytest
from mxep import jax_frontend, torch_frontend
from mxep.core_kernels.policy.swiglu_gradient import PARTS
from mxep.core_kernels.registry import OPS

from ..public_names import public_names

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "frontends.md"
frontends = pytest.mark.parametrize("frontend", [torch_frontend, jax_frontend], ids=lambda frontend: frontend.__name__)


def test_the_page_lists_names_that_only_one_frontend_exports() -> None:
    text = PAGE.read_text()
    only_one = public_names(torch_frontend) ^ public_names(jax_frontend)
    assert only_one
    assert not {name for name in only_one if f"`{name}`" not in text}


@frontends
def test_every_exported_name_exists(frontend: ModuleType) -> None:
    assert not [name for name in public_names(frontend) if not hasattr(frontend, name)]


@frontends
def test_help_of_a_package_fits_two_screens(frontend: ModuleType) -> None:
    assert len(pydoc.render_doc(frontend, renderer=pydoc.plaintext).splitlines()) <= 80


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
