"""The precision of a Mixture-of-Experts layer. A recipe holds no tiles, devices or kernels."""

from dataclasses import dataclass, replace
from typing import Literal, get_args

from ..dispatch import facts
from ..formats import BLOCK, Rounding
from ..launch import fail

Operands = Literal["bf16", "mxfp8", "fp8_rowwise", "fp8_blockwise"]
Compute = Literal["auto", "exact", "fold"]
TransferName = Literal["dispatch", "dispatch_grad", "combine", "combine_grad"]
"""Rows between ranks: tokens to the experts and their gradients back, the experts' rows back and their gradients to the
experts."""
Scales = Literal["power_of_two", "float32"]
Form = Literal["bf16", "mx", "fold", "row", "block", "block_power_of_two"]
"""Operand format of a product along the rows: bf16; MXFP8; MXFP8 folded to one scale per row; E4M3 quantized with one
scale per row; E4M3 with one fp32 scale per 128 values, per 128 x 128 of weights; the same with powers of two."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Precision of a Mixture-of-Experts layer.

    Args:
        name: what messages and tables call it.
        operands: of forward and input gradient.
            "mxfp8": blocks of 32 values share a scale; dispatch forward and combine backward send MXFP8 rows too.
            "fp8_rowwise": E4M3 with one power-of-two scale per row; the all-to-all sends bf16.
            "fp8_blockwise": E4M3 with one scale per 128 values of a row, and per 128 x 128 values of a weight, whose
                bytes serve forward and input gradient alike; the all-to-all sends bf16.
            "bf16": the same pipeline without quantization.
        wgrad_with_hp: True: the weight gradient multiplies bf16 operands. False, for "mxfp8" and "fp8_blockwise":
            tokens are quantized along the token dim too, and the weight gradient multiplies them: MXFP8, folded as
            `compute` says; with "fp8_blockwise" always folded, and made of bf16.
        rounding: how scales are chosen; RCEIL for "fp8_blockwise".
        compute: of MXFP8 operands. "exact" multiplies the dequantized values. "fold" first aligns the scales of a row
            to the largest, as the FP8 tensor cores of Hopper require; values lose the bits below the subnormals of
            E4M3. "auto" folds on Hopper and is exact elsewhere (`dispatch.Arch.folds`).
        alignment: rows that every expert's group is padded to, a positive multiple of 32. It changes no byte of
            results. On an H200 128 is 0 to 4% faster, by card, with 4096 rows per expert, and 7% slower with 256.
        scales: "power_of_two"; for "fp8_blockwise" also "float32", not rounded.
        mxfp8_all_to_all: the all-to-alls that send rows in MXFP8; the others send rows as they are. None is "dispatch"
            and "combine_grad" with MXFP8 operands, and no all-to-all with others. PyTorch alone takes another choice.

    Raises:
        ValueError: a value that is not allowed, or fields that exclude each other.
        TypeError: a field of another type.

    Example:
        >>> Recipe("careful", compute="exact").form("sm_90"), RECIPES["mxfp8"].form("sm_90")
        ('mx', 'fold')
    """

    name: str
    operands: Operands = "mxfp8"
    wgrad_with_hp: bool = True
    rounding: Rounding = Rounding.RCEIL
    compute: Compute = "auto"
    alignment: int = BLOCK
    scales: Scales = "power_of_two"
    mxfp8_all_to_all: tuple[TransferName, ...] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "rounding", Rounding.parse(self.rounding, "Recipe"))
        choices = {"operands": get_args(Operands), "compute": get_args(Compute), "scales": get_args(Scales)}
        for field, allowed in choices.items():
            if getattr(self, field) not in allowed:
                names = ", ".join(map(repr, allowed))
                fail(ValueError, "Recipe", field, repr(getattr(self, field)), f"allowed: {names}")
        for field, kind in (("name", str), ("wgrad_with_hp", bool), ("alignment", int)):
            if type(getattr(self, field)) is not kind:
                fail(TypeError, "Recipe", field, repr(getattr(self, field)), f"allowed: {kind.__name__}")
        given, names = self.mxfp8_all_to_all, get_args(TransferName)
        if given is not None:
            if not isinstance(given, tuple) or any(name not in names for name in given):
                allowed = f"allowed: None or a tuple of {', '.join(map(repr, names))}"
                fail(ValueError, "Recipe", "mxfp8_all_to_all", repr(given), allowed)
            # In one order: recipes that say the same are equal, on other ranks too.
            object.__setattr__(self, "mxfp8_all_to_all", tuple(name for name in names if name in given))
        blockwise = self.operands == "fp8_blockwise"
        if self.operands == "fp8_rowwise" and not self.wgrad_with_hp:
            fail(ValueError, "Recipe", "wgrad_with_hp", f"False with operands {self.operands!r}", "allowed: True")
        if self.scales == "float32" and not blockwise:
            got = f"'float32' with operands {self.operands!r}"
            fail(ValueError, "Recipe", "scales", got, "allowed: 'power_of_two', or operands 'fp8_blockwise'")
        if self.rounding is not Rounding.RCEIL and blockwise:
            got = f"{self.rounding.name} with operands 'fp8_blockwise'"
            fail(ValueError, "Recipe", "rounding", got, "allowed: RCEIL")
        if not BLOCK <= self.alignment < 2**31 or self.alignment % BLOCK:
            fail(ValueError, "Recipe", "alignment", self.alignment, f"allowed: positive multiples of {BLOCK}")

    @property
    def mx(self) -> bool:
        """Whether the products multiply MXFP8."""
        return self.operands == "mxfp8"

    def sends_mx(self, transfer: TransferName) -> bool:
        """Whether an all-to-all sends rows in MXFP8.

        Args:
            transfer: one of "dispatch", "dispatch_grad", "combine" and "combine_grad".

        Returns:
            True if the rows of this all-to-all are MXFP8.

        Example:
            >>> [RECIPES["mxfp8"].sends_mx(name) for name in ("dispatch", "dispatch_grad", "combine", "combine_grad")]
            [True, False, False, True]
        """
        return transfer in (
            (("dispatch", "combine_grad") if self.mx else ())
            if self.mxfp8_all_to_all is None
            else self.mxfp8_all_to_all
        )

    @property
    def wgrad_mx(self) -> bool:
        """Whether the weight gradient multiplies operands quantized along the tokens."""
        return self.operands in ("mxfp8", "fp8_blockwise") and not self.wgrad_with_hp

    def form(self, arch: str) -> Form:
        """Operand format of the products on an architecture.

        Args:
            arch: the name of the architecture: "cpu", "sm_90".

        Returns:
            "bf16", "mx", "fold", "row", "block" or "block_power_of_two".

        Example:
            >>> RECIPES["mxfp8"].form("cpu"), RECIPES["mxfp8"].form("sm_90")
            ('mx', 'fold')
        """
        if self.operands == "fp8_blockwise":
            return "block" if self.scales == "float32" else "block_power_of_two"
        if not self.mx:
            return "bf16" if self.operands == "bf16" else "row"
        return "fold" if self.compute == "fold" or (self.compute == "auto" and facts(arch).folds) else "mx"

    @classmethod
    def parse(cls, value: "Recipe | str", /, **changes: object) -> "Recipe":
        """Return a Recipe from itself or from a name in `RECIPES`, with fields changed if asked.

        Args:
            value: a Recipe, or a name in `RECIPES`.
            **changes: fields of `Recipe` and their new values.

        Returns:
            The Recipe, with the changes.

        Raises:
            ValueError: an unknown name, or a value that a field does not allow.
            TypeError: another type, or a name that is no field.

        Example:
            >>> Recipe.parse("mxfp8", rounding="floor").rounding.name
            'FLOOR'
        """
        if isinstance(value, str):
            if value not in RECIPES:
                fail(ValueError, "Recipe", "recipe", repr(value), f"allowed: {', '.join(map(repr, RECIPES))}")
            value = RECIPES[value]
        if not isinstance(value, cls):
            allowed = f"allowed: a Recipe or one of {', '.join(map(repr, RECIPES))}"
            fail(TypeError, "Recipe", "recipe", f"{type(value).__name__}", allowed)
        for unknown in [name for name in changes if name not in cls.__match_args__]:
            fail(TypeError, "Recipe", unknown, repr(changes[unknown]), "allowed: the fields of a Recipe")
        return replace(value, **changes) if changes else value


RECIPES = {
    "bf16": Recipe("bf16", operands="bf16"),
    "mxfp8": Recipe("mxfp8", wgrad_with_hp=False),
    "mxfp8_wgrad_with_hp": Recipe("mxfp8_wgrad_with_hp"),
    "fp8_rowwise": Recipe("fp8_rowwise", operands="fp8_rowwise"),
    "fp8_blockwise": Recipe("fp8_blockwise", operands="fp8_blockwise", scales="float32", wgrad_with_hp=False),
}
