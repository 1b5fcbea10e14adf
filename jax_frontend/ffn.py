"""The experts' feed-forward as one differentiable function: x is quantized once, h is never stored.

    forward (MXFP8)
      x --rows--> q, sf --w1--> gate --.
                    '-----w3--> up ----+--swiglu_row--> q, sf --w2--> out        saved: x, gate, up, weights' bytes
    backward
      dout --rows--w2--> dh --swiglu_bwd--> dgate, dup --rows----w1 + w3--> dx  (one sum, rounded once)
        |                                       '--------tokens--with x's--> dw1, dw3
        '----tokens--with h's, again from gate and up--> dw2

    rows      quantized along the rows: directly by swiglu_bwd_all (recipe "mxfp8"), or from bf16
    tokens    recipe "mxfp8": quantized along the tokens by quantize_both and swiglu_bwd_all; else bf16

With form "fold", products.py folds each operand once for both of its products; gate and up are one launch, and so are
dw1 and dw3. The kernel that computes h folds its rows. One read of a bf16 x or dout produces its row and token
operands, and the backward keeps the token operand of x instead of x. swiglu_bwd_fold, in place of swiglu_bwd_all, folds
all that it computes. Recipe "bf16" follows the same picture without quantization. h, dgate and dup are rounded to bf16
before they are quantized, so the bytes are those of the separate functions. dx alone differs: it is rounded once, the
separate functions round three times, and folded rows of dgate and dup have a headroom. With b1 or b3, whose gradients
sum them, dgate and dup are bf16 arrays too. A row's weight multiplies h and b2, so that it multiplies the row of out;
its gradient has a part of each.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ..core_kernels.formats import BLOCK
from ..core_kernels.launch import fail, require_multiple
from ..core_kernels.recipe import Recipe
from ..core_kernels.swiglu.activation import PLAIN, SwiGLU
from ._call import jitted, vary_alike
from ._checks import check_bias, check_blocks, check_floats, check_shape, check_type
from ._derivatives import reverse_only
from ._shapes import Float, Float32, Int
from .backward_operands import swiglu_operands
from .gathers import gather, ungather
from .groups import LaidOut, ends_of, pad_groups
from .mx_array import MXArray, MXGradArray, differentiated, received, values_of
from .ops import RowMap
from .products import (
    bias_gradient,
    bias_row_products,
    for_backward,
    input_gradient,
    output_gradient_operands,
    pair_of_products,
    pair_of_weight_gradients,
    product,
    quantize_activation,
    row_operand,
    sum_of_input_gradients,
    token_operand,
    weight_gradient,
)
from .remat import GATE, UP, named
from .swiglu import hidden_rows, row_probabilities
from .weights import (
    NoValues,
    QuantizedWeights,
    check_weights,
    cotangent_of,
    for_call,
    resolve_compute,
    saved,
)


class Options(NamedTuple):
    """Static arguments. weighted: `prob` multiplies b2 too; otherwise it only removes padding rows from h."""

    recipe: Recipe
    activation: SwiGLU
    weighted: bool
    mx_grad: bool


def _forward(rows, w1, w3, w2, group_ends, prob, biases, options: Options) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return out, gate and up. rows: the row operand of x."""
    recipe, numbers, (b1, b3, b2) = options.recipe, options.activation.attributes, biases
    weights, prob = prob if options.weighted else None, row_probabilities(prob)
    gate, up = pair_of_products(rows, w1, w3, group_ends, recipe, (b1, b3))
    h = hidden_rows(gate, up, prob, recipe, numbers)
    return product(h, w2, group_ends, recipe, bias=b2, row_weights=weights), gate, up


@partial(jax.custom_vjp, nondiff_argnums=(7,))
def _ffn(x, w1, w3, w2, group_ends, prob, biases, options: Options):
    rows = row_operand(x, options.recipe)
    out, _, _ = _forward(rows, w1, w3, w2, group_ends, prob, biases, options)
    return MXGradArray.of(out) if options.mx_grad else out


def _ffn_fwd(x, w1, w3, w2, group_ends, prob, biases, options: Options):
    recipe, mx_grad = options.recipe, options.mx_grad
    x_grad, h_grad = differentiated(x), differentiated((x, w1, w3, prob, biases[:2]))
    x, w1, w3, w2, group_ends, prob, biases = values_of((x, w1, w3, w2, group_ends, prob, biases))
    w1, w3, w2 = for_call(w1, recipe, x_grad), for_call(w3, recipe, x_grad), for_call(w2, recipe, h_grad)
    rows, tokens = quantize_activation(x, group_ends, recipe)
    out, gate, up = _forward(rows, w1, w3, w2, group_ends, prob, biases, options)
    gate, up = named(gate, GATE), named(up, UP)
    residuals = (
        NoValues(x.dtype) if tokens else for_backward(x, recipe),
        tokens,
        saved(w1),
        saved(w3),
        saved(w2),
        group_ends,
        prob,
        gate,
        up,
        biases,
    )
    return MXGradArray.of(out) if mx_grad else out, residuals


def _bias_gradients(values, grad, group_ends, prob, biases, options: Options):
    """The gradients of b1, b3 and b2, from dgate and dup in bf16 and the gradient of out; None without a bias."""
    b1, b3, b2 = biases
    db1, db3 = (None if b is None else bias_gradient(d, group_ends) for b, d in ((b1, values[0]), (b3, values[1])))
    return db1, db3, None if b2 is None else bias_gradient(grad, group_ends, prob if options.weighted else None)


def _ffn_bwd(options: Options, residuals, grad):
    x, tokens, w1, w3, w2, group_ends, prob, gate, up, biases = residuals
    recipe, grad = options.recipe, received(grad)
    glu = gate, up, row_probabilities(prob)
    dout, dout_tokens = output_gradient_operands(grad, group_ends, recipe)
    dh = input_gradient(dout, w2, group_ends, recipe, "bfloat16")
    need_values = any(b is not None for b in biases[:2])
    of_gate, of_up, h_tokens, dprob, values = swiglu_operands(
        dh, glu, group_ends, recipe, options.activation.attributes, need_values
    )
    (dgate, dgate_tokens), (dup, dup_tokens) = of_gate, of_up
    dbiases = _bias_gradients(values, grad, group_ends, prob, biases, options)
    if options.weighted and biases[2] is not None:
        dprob = dprob + bias_row_products(grad, biases[2], group_ends)
    dx = sum_of_input_gradients(dgate, w1, dup, w3, group_ends, recipe, x.dtype)
    tokens = tokens or token_operand(x, group_ends, recipe)
    dw1, dw3 = pair_of_weight_gradients(dgate_tokens, dup_tokens, tokens, group_ends, (w1.dtype, w3.dtype))
    dw2 = weight_gradient(dout_tokens, h_tokens, group_ends, w2.dtype)
    dx = MXArray.cotangent(dx) if isinstance(x, MXArray) else dx
    dws = (cotangent_of(w, dw) for w, dw in ((w1, dw1), (w3, dw3), (w2, dw2)))
    return dx, *dws, None, None if prob is None else dprob, dbiases


_ffn.defvjp(_ffn_fwd, _ffn_bwd, symbolic_zeros=True)
_ffn_jitted = jitted(_ffn, 7)


@jax.named_scope("mxep.experts")
def grouped_swiglu_ffn(
    x: Float[jax.Array, "P D"] | MXArray,
    w1: Float[jax.Array, "G F D"] | QuantizedWeights,
    w3: Float[jax.Array, "G F D"] | QuantizedWeights,
    w2: Float[jax.Array, "G D F"] | QuantizedWeights,
    group_ends: Int[jax.Array, " G"] | RowMap | LaidOut | None = None,
    prob: Float32[jax.Array, " P"] | None = None,
    *,
    b1: Float[jax.Array, "G F"] | Float[jax.Array, " F"] | None = None,
    b3: Float[jax.Array, "G F"] | Float[jax.Array, " F"] | None = None,
    b2: Float[jax.Array, "G D"] | Float[jax.Array, " D"] | None = None,
    activation: SwiGLU = PLAIN,
    recipe: Recipe | str = "mxfp8",
    pad_token_groups: bool = True,
    mx_grad: bool = False,
    group_sizes: Int[jax.Array, " G"] | None = None,
) -> Float[jax.Array, "P D"] | MXGradArray:
    """prob * ((silu(x w1^T + b1) * (x w3^T + b3)) w2^T + b2) for each group of rows; differentiable in x, the weights,
    the biases and prob.

    x: (P, D) bf16 or fp32, quantized here, once; or an MXArray, used as it is. The recipes "bf16" and "fp8_..."
        dequantize an MXArray.
    w1, w3: (G, F, D), w2: (G, D, F), bf16 or fp32; D and F are multiples of 32, unless the recipe is "bf16". Or their
        QuantizedWeights, made with the same recipe, whose `values` get the gradients.
    group_ends: (G,) int32, the end of each group of rows; or the RowMap or Route that laid the rows out, which has
        them. Rows past the last end give zeros.
    prob: (P,) float32, a weight for each row, which multiplies h before it is rounded, and b2; None is a weight of 1.
    b1, b3: (F,) for all groups or (G, F), b2: (D,) or (G, D), bf16 or fp32; or None. They are added to fp32 sums. With
        b1 or b3 the backward stores the gradients of gate and up in bf16 before it quantizes them; with b2 and prob the
        sums of the last product are stored in fp32.
    activation: a `SwiGLU`, for models that clamp or scale gate and up.
    recipe: a `Recipe` or its name.
    pad_token_groups, mx_grad, group_sizes: as in `grouped_mm`.

    Returns (P, D) bf16, or an MXGradArray of it. The gradients have their argument's dtype. Raises ValueError (shapes,
    QuantizedWeights of another recipe, values of group_ends in eager calls) and TypeError (dtypes), as `grouped_mm`
    does.

    >>> x, w = jnp.ones((1, 32)), jnp.full((1, 32, 32), 1 / 32)
    >>> grouped_swiglu_ffn(x, w, w, w, jnp.array([1]))[0, 0].item()  # sigmoid(1) = 0.731, in E4M3 0.75
    0.75
    >>> gpt_oss = SwiGLU(alpha=1.702, limit=7.0, offset=1.0)
    >>> grouped_swiglu_ffn(x, w, w, w, jnp.array([1]), b2=jnp.ones(32), activation=gpt_oss)[0, 0].item()
    2.75

    Source: Shazeer, "GLU Variants Improve Transformer", 2020.
    """
    op, recipe = "grouped_swiglu_ffn", resolve_compute("grouped_swiglu_ffn", recipe)
    SwiGLU.check(op, activation)
    check_type(op, "mx_grad", mx_grad, bool)
    check_type(op, "pad_token_groups", pad_token_groups, bool)
    if not isinstance(x, MXArray):
        check_floats(op, "x", x, " or an MXArray")
    for name, weight in (("w1", w1), ("w3", w3), ("w2", w2)):
        check_weights(op, name, weight, recipe)
    if len(x.shape) != 2 or w1.ndim != 3:
        fail(ValueError, op, "x, w1", f"shapes {x.shape}, {w1.shape}", "allowed: (P, D) and (G, F, D)")
    groups, hidden, _ = w1.shape
    shapes = {"w1": (groups, hidden, x.shape[1]), "w3": w1.shape, "w2": (groups, x.shape[1], hidden)}
    for (name, shape), weight in zip(shapes.items(), (w1, w3, w2), strict=True):
        if weight.shape != shape:
            fail(ValueError, op, name, f"shape {weight.shape}", f"allowed: {shape}, of x (P, D) and w1 (G, F, D)")
    group_ends = ends_of(op, group_ends, group_sizes, x, groups)
    if prob is not None:
        check_shape(op, "prob", prob, x.shape[:1], "one weight per row", "float32")
    sides = (("b1", b1, hidden), ("b3", b3, hidden), ("b2", b2, x.shape[1]))
    biases = tuple(None if b is None else check_bias(op, name, b, groups, n) for name, b, n in sides)
    if recipe.operands != "bf16":
        require_multiple(op, "w1", hidden, BLOCK, "dim 1, F,", "the w2 product quantizes along it")
    weighted = prob is not None
    x, w1, w3, w2, prob, biases = reverse_only(op, (x, w1, w3, w2, prob, biases))
    check_blocks(op, "x", x.shape[0], group_ends, recipe.wgrad_mx and not pad_token_groups)
    maps = None
    if pad_token_groups and recipe.wgrad_mx:
        x, maps = pad_groups(op, x, group_ends, recipe.alignment)
        group_ends = maps.group_ends
        if prob is not None:
            prob = gather(op, prob[:, None], maps.row_map, maps.inverse)[:, 0]
        elif b1 is not None or b3 is not None:  # h of a padding row is not zero by itself
            prob = (maps.row_map >= 0).astype(jnp.float32)
    options = Options(recipe, activation, weighted, mx_grad)
    out = _ffn_jitted(*vary_alike(x, w1, w3, w2, group_ends, prob, biases), options)
    return ungather(op, out, maps.row_map, maps.inverse) if maps else out
