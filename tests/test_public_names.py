"""Who knows one frontend's names knows the other's: what only one of them exports stands in the README."""

from pathlib import Path

from mxep import jax_frontend, torch_frontend

README = Path(__file__).parents[1] / "README.md"


def test_a_name_that_one_frontend_alone_exports_is_in_the_readme() -> None:
    text = README.read_text()
    alone = set(torch_frontend.__all__) ^ set(jax_frontend.__all__)
    assert alone
    assert not {name for name in alone if f"`{name}`" not in text}


def test_what_is_exported_is_there() -> None:
    for frontend in (torch_frontend, jax_frontend):
        assert not [name for name in frontend.__all__ if not hasattr(frontend, name)]
