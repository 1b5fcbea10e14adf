"""The operands of the products in the backward of ffn.py, in the recipe's form.

    dh, gate, up, prob --swiglu_operands--> dgate, dup --.--rows----> dx = dgate w1 + dup w3
                               |                         '--tokens--> dw1, dw3 = dgate^T x, dup^T x
                               '----> h, again --tokens--> dw2 = dout^T h

Those of dout are `output_gradient_operands`. The recipe chooses the kernel. With b1 or b3 another kernel computes dgate
and dup in bf16.
"""

from ..core_kernels.recipe import Recipe
from . import ops
from .products import along_tokens, output_gradient_operands, token_operand
from .weights import Folded, form_of


def swiglu_operands(dh, glu, group_ends, recipe: Recipe, numbers: tuple[float, float, float], need_values: bool):
    """Return dgate and dup, each as (row operand, token operand); the token operand of h, again; dprob; and dgate and
    dup in bf16 if `need_values`. glu: gate, up, prob. numbers: of the activation."""
    attributes = recipe.rounding, False, *numbers
    if recipe.wgrad_mx and form_of(recipe) == "fold":
        values = ops.swiglu_bwd(dh, *glu, *numbers)[:2] if need_values else (None, None)
        *parts, dprob = ops.swiglu_bwd_fold(dh, *glu, group_ends, *attributes)
        gate, gate_t, up, up_t, h = (Folded(*parts[i : i + 2]) for i in range(0, 10, 2))
        return (gate, gate_t), (up, up_t), h, dprob, values
    if not recipe.wgrad_mx:
        dgate, dup, dprob = ops.swiglu_bwd(dh, *glu, *numbers)
        operands = ((d, token_operand(d, group_ends, recipe)) for d in (dgate, dup))
        return *operands, ops.swiglu(*glu, *numbers), dprob, (dgate, dup)
    if need_values:
        dgate, dup, dprob = ops.swiglu_bwd(dh, *glu, *numbers)
        operands = (output_gradient_operands(d, group_ends, recipe) for d in (dgate, dup))
        h = along_tokens(ops.swiglu_col(*glu, *attributes), group_ends, recipe)
        return *operands, h, dprob, (dgate, dup)
    q, sf, q_t, sf_t, up_q, up_sf, up_q_t, up_sf_t, h_q_t, h_sf_t, dprob = ops.swiglu_bwd_all(dh, *glu, *attributes)
    dgate, dup, h = (along_tokens(t, group_ends, recipe) for t in ((q_t, sf_t), (up_q_t, up_sf_t), (h_q_t, h_sf_t)))
    return ((q, sf), dgate), ((up_q, up_sf), dup), h, dprob, (None, None)
