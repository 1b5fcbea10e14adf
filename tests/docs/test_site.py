"""docs/hooks: the build of the site fails if a page loads a file from another host."""

import runpy
from pathlib import Path

import pytest

HOOK = Path(__file__).parents[2] / "docs" / "hooks" / "offline.py"
external = runpy.run_path(str(HOOK))["external"]


@pytest.mark.parametrize("loaded", [
    '<script src="https://a.org/b.js"></script>',
    '<link rel="stylesheet" href="//fonts.a.org/css">',
    "<img alt=a src=https://a.org/b.png>",
    '<iframe src="http://a.org"></iframe>',
    "<style>@import 'https://a.org/b.css'</style>",
    "<style>a { background: url(https://a.org/b.png) }</style>",
])  # fmt: skip
def test_a_file_of_another_host_is_found(tmp_path: Path, loaded: str) -> None:
    (tmp_path / "a.html").write_text(f"<html>{loaded}</html>")
    (found,) = external(tmp_path)
    assert found.startswith("a.html: ")
    assert "a.org" in found


def test_files_of_the_site_and_links_to_follow_are_not(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<script src="b.js"></script><link href="c.css"><a href="https://a.org">a</a><code>url(https://a.org)</code>'
    )
    (tmp_path / "c.css").write_text("a { background: url(d.svg) }")
    assert not external(tmp_path)
    (tmp_path / "c.css").write_text("@import url(https://a.org/b.css);")
    assert external(tmp_path) == ["c.css: https://a.org/b.css"]
