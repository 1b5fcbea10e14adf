"""Settings of all pictures: the same bytes from the same lines, and colors for light and dark pages."""

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

# Without these settings the ids within an SVG are random, and every run writes another file.
REPRODUCIBLE: dict[Any, Any] = {"svg.hashsalt": "mxep", "svg.fonttype": "none"}
# Matplotlib writes colors into style attributes, which `!important` replaces. The background stays opaque: a page whose
# own switch differs from the browser's scheme shows the picture of the other scheme, still readable.
DARK = """<style type="text/css">@media (prefers-color-scheme: dark) {
text {fill: #e6edf3}
[style*="fill: #ffffff"] {fill: #0d1117 !important}
[style*="stroke: #000000"] {stroke: #e6edf3 !important}
}</style>
"""


def with_dark_colors(svg: str) -> str:
    """An SVG of matplotlib with colors for dark pages, black and white exchanged."""
    end = " </defs>\n"
    if end not in svg:
        raise ValueError("with_dark_colors: svg: got no </defs>; allowed: an SVG of matplotlib")
    return svg.replace(end, f"  {DARK}{end}", 1)


def save(figure: Figure, path: Path) -> None:
    """Write the figure as SVG or PNG after the path's ending, within `rc_context(REPRODUCIBLE)`."""
    if path.suffix != ".svg":
        figure.savefig(path)
        return
    figure.savefig(path, metadata={"Date": None})
    path.write_text(with_dark_colors(path.read_text()))
