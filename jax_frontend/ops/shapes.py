"""Shapes in annotations: `Float[jax.Array, "M K"]`, in jaxtyping's notation, as help() and editors show them.

Float      bf16 or fp32        BFloat16, Float32    one of them
Int        any integers        Bytes                uint8
"... D"    any leading dims    " G"                 one dim; without the space a linter reads a name

A type checker reads `typing.Annotated`, an array. Nothing is checked when a function is called: its own checks name the
argument. The function's docstring explains the letters.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing import Annotated as BFloat16
    from typing import Annotated as Bytes
    from typing import Annotated as Float
    from typing import Annotated as Float32
    from typing import Annotated as Int
else:

    class _Shown:
        """An annotation that prints as its text, alone and in a union."""

        def __init__(self, text: str) -> None:
            self.text = text

        def __repr__(self) -> str:
            return self.text

        def __or__(self, other: Any) -> "_Shown":
            return _Shown(f"{self.text} | {_text(other)}")

        def __ror__(self, other: Any) -> "_Shown":
            return _Shown(f"{_text(other)} | {self.text}")

    class _Dtype:
        """float[jax.Array, dims] -> an annotation."""

        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, item: tuple[type, str]) -> _Shown:
            array, dims = item
            return _Shown(f'{self.name}[{_text(array)}, "{dims.strip()}"]')

    def _text(annotation: Any) -> str:
        if annotation is None or annotation is type(None):
            return "None"
        return annotation.__name__.rpartition(".")[2] if isinstance(annotation, type) else str(annotation)

    BFloat16, Bytes, Float, Float32, Int = map(_Dtype, ("BFloat16", "Bytes", "Float", "Float32", "Int"))
