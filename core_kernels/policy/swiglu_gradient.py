"""The op of SwiGLU's backward, by the operands of dgate and dup that the products after it multiply.

    rows   tokens   h       form "fold"        form "mx"          another form, or values, or padded tokens
    yes    yes      yes     swiglu_bwd_fold    swiglu_bwd_all     swiglu_bwd, in bf16, and quantized after it
    yes    yes      no      swiglu_bwd_both    swiglu_bwd_both
    no     yes              swiglu_bwd_col     swiglu_bwd_col
    yes    no               swiglu_bwd_row     swiglu_bwd_row
    no     no               swiglu_bwd         swiglu_bwd

swiglu_bwd_fold reads gate and up once, for all operands; values in bf16 are then another read.
"""

from typing import NamedTuple

from .recipe import Form


class Needs(NamedTuple):
    """What a backward needs.

    Attributes:
        rows: operands of dgate and dup along their rows.
        tokens: operands of dgate and dup along the tokens.
        values: dgate and dup in bf16.
        hidden: an operand of h along the tokens.
    """

    rows: bool
    tokens: bool
    values: bool
    hidden: bool


PARTS = {
    "swiglu_bwd_row": ("gate_rows", "up_rows"),
    "swiglu_bwd_col": ("gate_tokens", "up_tokens"),
    "swiglu_bwd_both": ("gate_rows", "gate_tokens", "up_rows", "up_tokens"),
    "swiglu_bwd_all": ("gate_rows", "gate_tokens", "up_rows", "up_tokens", "hidden"),
    "swiglu_bwd_fold": ("gate_rows", "gate_tokens", "up_rows", "up_tokens", "hidden"),
}
"""The outputs of each op, each with its scales; dprob follows."""


def gradient_op(form: Form, quantized_tokens: bool, needs: Needs) -> str:
    """Choose the op that computes SwiGLU's backward.

    Args:
        form: of the operands, by `Recipe.form`.
        quantized_tokens: operands along the tokens are quantized, and groups have no padding between their tokens.
        needs: the gradients that are asked for.

    Returns:
        The name of the op.

    Example:
        >>> gradient_op("mx", True, Needs(rows=True, tokens=True, values=False, hidden=True))
        'swiglu_bwd_all'
    """
    rows, tokens, values, hidden = needs
    if form == "fold" and quantized_tokens and rows and tokens and hidden:
        return "swiglu_bwd_fold"
    if form not in ("mx", "fold") or values or (tokens and not quantized_tokens):
        return "swiglu_bwd"
    if tokens:
        return ("swiglu_bwd_all" if hidden else "swiglu_bwd_both") if rows else "swiglu_bwd_col"
    return "swiglu_bwd_row" if rows else "swiglu_bwd"
