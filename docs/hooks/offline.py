"""The built pages load nothing from another host: no script, style, font, picture or frame."""

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

LOADED = {"script": "src", "link": "href", "img": "src", "iframe": "src", "source": "src", "object": "data"}
EXTERNAL = re.compile(r"^(?:https?:)?//", re.IGNORECASE)
STYLE = re.compile(r"(?:url\(\s*|@import\s+)[\"']?((?:https?:)?//[^\"')\s]+)", re.IGNORECASE)


class Resources(HTMLParser):
    """The external addresses that a browser loads with a page; an address that the reader clicks on is none."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.external: list[str] = STYLE.findall("".join(re.findall(r"<style.*?</style>", page, re.DOTALL)))
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        address = dict(attrs).get(LOADED.get(tag, ""))
        if address and EXTERNAL.match(address):
            self.external.append(address)


def external(site: Path) -> list[str]:
    """PAGE: ADDRESS of everything that the site loads from another host."""
    pages = {path: Resources(path.read_text()).external for path in site.rglob("*.html")}
    styles = {path: STYLE.findall(path.read_text()) for path in site.rglob("*.css")}
    return [f"{path.relative_to(site)}: {address}" for path, found in (pages | styles).items() for address in found]


def on_post_build(config: Any) -> None:
    if found := external(Path(config.site_dir)):
        raise ValueError("the site loads files from other hosts:\n" + "\n".join(found))
