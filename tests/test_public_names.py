"""Both frontends export the same names; docs/frontends.md lists the exceptions."""

import pydoc
from pathlib import Path
from types import ModuleType

import pytest
from mxep import jax_frontend, torch_frontend

from .public_names import public_names

PAGE = Path(__file__).parents[1] / "docs" / "frontends.md"
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
