"""Both frontends export the same names; docs/frontends.md lists the exceptions."""

from pathlib import Path

from mxep import jax_frontend, torch_frontend

PAGE = Path(__file__).parents[1] / "docs" / "frontends.md"


def test_the_page_lists_names_that_only_one_frontend_exports() -> None:
    text = PAGE.read_text()
    only_one = set(torch_frontend.__all__) ^ set(jax_frontend.__all__)
    assert only_one
    assert not {name for name in only_one if f"`{name}`" not in text}


def test_every_exported_name_exists() -> None:
    for frontend in (torch_frontend, jax_frontend):
        assert not [name for name in frontend.__all__ if not hasattr(frontend, name)]
