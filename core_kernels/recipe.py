"""What is computed in which precision. A recipe never says how: no tiles, no devices, no kernels."""

from dataclasses import dataclass, replace
from typing import Literal

from .formats import BLOCK, Rounding


@dataclass(frozen=True, slots=True)
class Recipe:
    """Precision of a Mixture-of-Experts layer.

    name: one of `RECIPES`.
    quantized: forward and input gradient multiply MXFP8 operands; dispatch forward and combine
        backward carry MXFP8 rows. False: bf16 throughout, on the same pipeline.
    wgrad_with_hp: the weight gradient multiplies bf16 operands (what expert parallelism trains with);
        False: tokens are re-quantized along the token dim and the weight gradient is MXFP8 too.
    rounding: how block scales are chosen.
    compute: "exact" multiplies the dequantized values; the only mode on a CPU.
    alignment: rows every expert's group is padded to, a positive multiple of 32.
    """

    name: str
    quantized: bool = True
    wgrad_with_hp: bool = True
    rounding: Rounding = Rounding.RCEIL
    compute: Literal["exact"] = "exact"
    alignment: int = BLOCK

    def __post_init__(self) -> None:
        object.__setattr__(self, "rounding", Rounding.parse(self.rounding))
        if self.compute != "exact":
            raise ValueError(f"Recipe: compute: got {self.compute!r}; allowed is 'exact'")
        if self.alignment <= 0 or self.alignment % BLOCK:
            raise ValueError(f"Recipe: alignment: got {self.alignment}; allowed are positive multiples of {BLOCK}")

    @classmethod
    def parse(cls, value: "Recipe | str", **changes: object) -> "Recipe":
        """Return a Recipe from itself or from a name in `RECIPES`, with fields changed if asked.

        >>> Recipe.parse("mxfp8", rounding="floor").rounding.name
        'FLOOR'

        Raises ValueError for an unknown name, TypeError for another type.
        """
        if isinstance(value, str):
            if value not in RECIPES:
                raise ValueError(f"recipe: got {value!r}; allowed are {', '.join(map(repr, RECIPES))}")
            value = RECIPES[value]
        if not isinstance(value, cls):
            raise TypeError(
                f"recipe: got {type(value).__name__}; pass a Recipe or one of {', '.join(map(repr, RECIPES))}"
            )
        return replace(value, **changes) if changes else value


RECIPES = {
    "bf16": Recipe("bf16", quantized=False),
    "mxfp8": Recipe("mxfp8", wgrad_with_hp=False),
    "mxfp8_wgrad_with_hp": Recipe("mxfp8_wgrad_with_hp"),
}
