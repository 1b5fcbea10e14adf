"""Links of pages to files outside of docs/: pages and pictures are added to the site; of others the path is shown.

docs/guides/a.md --](../../benchmarks/results/README.md)--> repository/benchmarks/results/README.md of the site
                 --[a test](../../tests/test_b.py)--> a test (`tests/test_b.py`)
"""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
FOLDER = "repository/"
ADDED = (".md", ".png", ".svg")
LINK = re.compile(r"(?P<text>!?\[(?:[^\[\]]|\[[^\]]*\])*\])\((?P<path>[^)#\s:]+)(?P<anchor>#[^)\s]*)?\)")
CODE = re.compile(r"^( *)```.*?^\1```|`[^`\n]+`", re.DOTALL | re.MULTILINE)


def source_of(uri: str) -> str:
    """The path in the repository of a page of the site."""
    return uri.removeprefix(FOLDER) if uri.startswith(FOLDER) else f"docs/{uri}"


def page_of(source: str) -> str:
    """The page of the site that has the content of a file of the repository."""
    return source.removeprefix("docs/") if source.startswith("docs/") else FOLDER + source


def replaced(markdown: str, source: str, target: Callable[[re.Match[str], str], str]) -> str:
    """The page with every relative link replaced by `target(link, path in the repository)`; code keeps its text."""
    code = [match.span() for match in CODE.finditer(markdown)]

    def replace(link: re.Match[str]) -> str:
        if any(start < link.start() < end for start, end in code):
            return link[0]
        return target(link, os.path.normpath(os.path.join(os.path.dirname(source), link["path"])))

    return LINK.sub(replace, markdown)


def linked(source: str) -> list[str]:
    """The pages and pictures that a page of the repository links to."""
    found: list[str] = []
    replaced((ROOT / source).read_text(), source, lambda link, path: found.append(path) or link[0])
    return [path for path in found if path.endswith(ADDED) and (ROOT / path).is_file()]


def on_files(files: Files, config: Any) -> Files:
    seen = {source_of(file.src_uri) for file in files}
    new = [path for path in seen if path.startswith("docs/") and path.endswith(".md") and (ROOT / path).is_file()]
    new += ["CHANGELOG.md"]
    while new:
        page = new.pop()
        if page not in seen:
            seen.add(page)
            files.append(File.generated(config, page_of(page), abs_src_path=str(ROOT / page)))
        if page.endswith(".md"):
            new += [path for path in linked(page) if path not in seen]
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    source = source_of(page.file.src_uri)

    def target(link: re.Match[str], path: str) -> str:
        if path.startswith("docs/") and source.startswith("docs/"):
            return link[0]
        if files.get_file_from_path(page_of(path)):
            address = os.path.relpath(page_of(path), os.path.dirname(page.file.src_uri))
            return f"{link['text']}({address}{link['anchor'] or ''})"
        if not (ROOT / path).exists():
            raise ValueError(f"{source}: no file {path}")
        text = link["text"][1:-1]
        return text if path in text else f"{text} (`{path}`)"

    return replaced(markdown, source, target)
