"""The frontends share their public names; docs/frontends.md lists every name that only one of them exports."""

from pathlib import Path

from mxep import jax_frontend, torch_frontend

PAGE = Path(__file__).parents[1] / "docs" / "frontends.md"


def test_a_name_of_one_frontend_is_in_the_table_of_differences() -> None:
    text = PAGE.read_text()
    alone = set(torch_frontend.__all__) ^ set(jax_frontend.__all__)
    assert alone
    assert not {name for name in alone if f"`{name}`" not in text}


def test_every_exported_name_exists() -> None:
    for frontend in (torch_frontend, jax_frontend):
        assert not [name for name in frontend.__all__ if not hasattr(frontend, name)]
