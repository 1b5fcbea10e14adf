"""An extension of griffe: examples outside of a section "Examples" are shown as code, not as text."""

import re
from typing import Any

from griffe import Extension, Object

EXAMPLE = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)


class FencedExamples(Extension):
    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = EXAMPLE.sub(lambda lines: f"```pycon\n{lines[0]}\n```", obj.docstring.value)
