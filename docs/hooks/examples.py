"""An extension of griffe: the section "Example" is shown as code, as griffe shows "Examples"."""

import re
from typing import Any

from griffe import Extension, Object


class Example(Extension):
    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
