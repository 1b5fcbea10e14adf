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

With form "fold", forms/fold.py folds each operand once for both of its products; gate and up are one launch, and so are
dw1 and dw3. The kernel that computes h folds its rows. One read of a bf16 x or dout produces its row and token
operands, and the backward keeps the token operand of x instead of x. swiglu_bwd_fold, in place of swiglu_bwd_all, folds
all that it computes. Recipe "bf16" follows the same picture without quantization. h, dgate and dup are rounded to bf16
before they are quantized, so the bytes equal the bytes of the separate functions. dx alone differs: it is rounded once,
the separate functions round three times, and folded rows of dgate and dup have a headroom. With b1 or b3, whose
gradients sum them, dgate and dup are bf16 arrays too. A row's weight multiplies h and b2, so that it multiplies the row
of out; its gradient has a part of each.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ...core_kernels.formats import BLOCK, GRADIENT_HEADROOM
from ...core_kernels.launch import fail, require_multiple
from ...core_kernels.policy.recipe import Recipe
from ...core_kernels.swiglu.activation import PLAIN, SwiGLU
from ..ops import RowMap
from ..ops.call import jitted, vary_alike
from ..ops.checks import check_bias, check_blocks, check_shape, check_type
from ..ops.derivatives import reverse_only
from ..ops.mx_array import MXArray, MXGradArray, differentiated, received, values_of
from ..ops.remat import GATE, UP, named
from ..ops.shapes import Float, Float32, Int
from .forms.form import AddedBias, Format, Glu
from .gathers import gather, ungather
from .grouped_mm import check_operands
from .groups import LaidOut, ends_of, pad_groups
from .products import bias_gradient, bias_row_products
from .swiglu import row_probabilities
from .weights import (
    NoValues,
    QuantizedWeights,
    along_k,
    along_n,
    cotangent_of,
    format_of,
    is_frozen,
    quantize_for_call,
    resolve_compute,
    saved,
    saved_rows,
    without_tokens,
)

Bias = Float[jax.Array, "G N"] | Float[jax.Array, " N"] | None


class Options(NamedTuple):
    """Static arguments.

    weighted: `prob` multiplies b2 too; otherwise it only removes padding rows from h. clear_rest: rows past the last
    end are zeros in the result and in the gradients of x and prob, and in products in between; otherwise they are
    unspecified.
    """

    form: Format
    activation: SwiGLU
    weighted: bool
    mx_grad: bool
    clear_rest: bool


class Biases(NamedTuple):
    """The biases of the three products, in the order of their weights."""

    b1: Any = None
    b3: Any = None
    b2: Any = None

    @classmethod
    def check(cls, op: str, biases: object) -> "Biases":
        """Return the three biases, all None for None; raise TypeError unless it is a tuple of three."""
        if biases is None:
            return cls()
        if not isinstance(biases, tuple):
            got = type(biases).__name__
        elif len(biases) != 3:
            got = f"{len(biases)} items"
        else:
            return cls._make(biases)
        fail(TypeError, op, "biases", got, "allowed: None, or a tuple (b1, b3, b2) of arrays or None")


class Saved(NamedTuple):
    """x: what tokens are made of, if the forward has not made them. Weights: the part that a backward reads."""

    x: Any
    tokens: Any
    w1: Any
    w3: Any
    w2: Any
    group_ends: jax.Array
    prob: jax.Array | None
    gate: jax.Array
    up: jax.Array
    biases: Biases


def _glu(gate, up, prob, ends, options: Options) -> Glu:
    return Glu(gate, up, row_probabilities(prob), options.activation.attributes, ends)


def _forward(rows, w1, w3, w2, group_ends, prob, biases: Biases, options: Options):
    """Return out, gate and up. rows: the row operand of x."""
    form = options.form
    weights = along_k(w1, form), along_k(w3, form)
    gate, up = form.mm_pair(rows, weights[0], weights[1], group_ends, biases.b1, biases.b3, options.clear_rest)
    h = form.hidden(_glu(gate, up, prob, group_ends, options))
    added = None
    if biases.b2 is not None:
        added = AddedBias(biases.b2, prob if options.weighted else None)
    return form.mm(h, along_k(w2, form), group_ends, "bfloat16", added, options.clear_rest), gate, up


@partial(jax.custom_vjp, nondiff_argnums=(7,))
def _ffn(x, w1, w3, w2, group_ends, prob, biases, options: Options):
    out, _, _ = _forward(options.form.rows(x, group_ends), w1, w3, w2, group_ends, prob, biases, options)
    return MXGradArray.of(out) if options.mx_grad else out


def _ffn_fwd(x, w1, w3, w2, group_ends, prob, biases, options: Options):
    form = options.form
    x_grad, h_grad = differentiated(x), differentiated((x, w1, w3, prob, biases[:2]))
    x, w1, w3, w2, group_ends, prob, biases = values_of((x, w1, w3, w2, group_ends, prob, biases))
    w1, w3, w2 = (
        quantize_for_call(w1, form, x_grad),
        quantize_for_call(w3, form, x_grad),
        quantize_for_call(w2, form, h_grad),
    )
    rows, tokens = form.activation(x, group_ends)
    out, gate, up = _forward(rows, w1, w3, w2, group_ends, prob, biases, options)
    residuals = Saved(
        x=NoValues(x.dtype) if tokens else saved_rows(x, w1, form),
        tokens=tokens,
        w1=saved(w1),
        w3=saved(w3),
        w2=saved(w2),
        group_ends=group_ends,
        prob=prob,
        gate=named(gate, GATE),
        up=named(up, UP),
        biases=biases,
    )
    return MXGradArray.of(out) if options.mx_grad else out, residuals


def _bias_gradients(values, grad, kept: Saved, options: Options) -> Biases:
    """The gradients of the biases, from dgate and dup in bf16 and the gradient of out; None without a bias."""
    (b1, b3, b2), ends = kept.biases, kept.group_ends
    db1, db3 = (None if b is None else bias_gradient(d, ends) for b, d in ((b1, values[0]), (b3, values[1])))
    return Biases(db1, db3, None if b2 is None else bias_gradient(grad, ends, kept.prob if options.weighted else None))


def _ffn_bwd(options: Options, kept: Saved, grad):
    form, ends, grad, biases = options.form, kept.group_ends, received(grad), kept.biases
    dout, dout_tokens = form.gradient(grad, ends)
    dh = form.mm(form.rows(dout, ends), along_n(kept.w2, form), ends, "bfloat16", clear_rest=options.clear_rest)
    need_values = biases.b1 is not None or biases.b3 is not None
    found = form.swiglu_backward(dh, _glu(kept.gate, kept.up, kept.prob, ends, options), need_values)
    dprob = found.dprob
    dbiases = _bias_gradients(found.values, grad, kept, options)
    if options.weighted and biases.b2 is not None:
        dprob = dprob + bias_row_products(grad, biases.b2, ends)
    # Folded rows have the bytes of swiglu_bwd_fold, whichever op quantizes them.
    dgate, dup = (form.rows(x, ends, GRADIENT_HEADROOM) for x in (found.gate.rows, found.up.rows))
    weights = along_n(kept.w1, form), along_n(kept.w3, form)
    dx = form.mm_sum(dgate, weights[0], dup, weights[1], ends, kept.x.dtype, options.clear_rest)
    dw1 = dw3 = dw2 = None
    if not is_frozen(kept.w1):
        tokens = kept.tokens or form.tokens(kept.x, ends)
        dw1, dw3 = form.wgrad_pair(found.gate.tokens, found.up.tokens, tokens, ends, (kept.w1.dtype, kept.w3.dtype))
        dw2 = form.wgrad(dout_tokens, found.hidden, ends, kept.w2.dtype)
    dx = MXArray.cotangent(dx) if isinstance(kept.x, MXArray) else dx
    dws = (cotangent_of(w, dw) for w, dw in ((kept.w1, dw1), (kept.w3, dw3), (kept.w2, dw2)))
    return dx, *dws, None, None if kept.prob is None else dprob, dbiases


_ffn.defvjp(_ffn_fwd, _ffn_bwd, symbolic_zeros=True)
_ffn_jitted = jitted(_ffn, 7)


def grouped_swiglu_ffn(
    x: Float[jax.Array, "P D"] | MXArray,
    w1: Float[jax.Array, "G F D"] | QuantizedWeights,
    w3: Float[jax.Array, "G F D"] | QuantizedWeights,
    w2: Float[jax.Array, "G D F"] | QuantizedWeights,
    group_ends: Int[jax.Array, " G"] | RowMap | LaidOut | None = None,
    prob: Float32[jax.Array, " P"] | None = None,
    *,
    biases: tuple[Bias, Bias, Bias] | None = None,
    activation: SwiGLU = PLAIN,
    recipe: Recipe | str = "mxfp8",
    pad_token_groups: bool = True,
    mx_grad: bool = False,
    group_sizes: Int[jax.Array, " G"] | None = None,
) -> Float[jax.Array, "P D"] | MXGradArray:
    """Compute prob * ((silu(x w1^T + b1) * (x w3^T + b3)) w2^T + b2) for each group of rows.

    The result is differentiable in x, the weights, the biases and prob. A gradient has the dtype of its argument.

    Args:
        x: (P, D) bfloat16 or float32, quantized here, once; or an MXArray, used as it is. The recipes "bf16" and
            "fp8_..." dequantize an MXArray.
        w1: (G, F, D), bfloat16 or float32; D and F are multiples of 32, unless the recipe is "bf16". Or its
            QuantizedWeights, made with the same recipe, whose `values` get the gradient; or frozen weights, all three.
        w3: Like w1.
        w2: (G, D, F), like w1.
        group_ends: (G,) int32, the end of each group of rows; or the RowMap or Route that laid the rows out, which has
            them. Rows past the last end give zeros.
        prob: (P,) float32, a weight for each row, which multiplies h before it is rounded, and b2. None is 1.
        biases: None, or (b1, b3, b2), each bfloat16, float32 or None. b1 and b3 are (G, F), or (F,) for all groups; b2
            is (G, D) or (D,). They are added to fp32 sums. With b1 or b3 the backward stores the gradients of gate and
            up in bf16 before it quantizes them. With b2 and prob the sums of the last product are stored in fp32.
        activation: A `SwiGLU`, for models that clamp or scale gate and up.
        recipe: A `Recipe` or its name.
        pad_token_groups: As in `grouped_mm`.
        mx_grad: As in `grouped_mm`.
        group_sizes: As in `grouped_mm`.

    Returns:
        (P, D) bfloat16, or an MXGradArray of it.

    Raises:
        ValueError: For shapes, QuantizedWeights of another recipe, and values of group_ends in eager calls.
        TypeError: For other dtypes and types.

    Example:
        >>> x, w = jnp.ones((1, 32)), jnp.full((1, 32, 32), 1 / 32)
        >>> grouped_swiglu_ffn(x, w, w, w, jnp.array([1]))[0, 0].item()  # sigmoid(1) = 0.731, in E4M3 0.75
        0.75
        >>> gpt_oss = SwiGLU(alpha=1.702, limit=7.0, offset=1.0)
        >>> biases = (None, None, jnp.ones(32))
        >>> grouped_swiglu_ffn(x, w, w, w, jnp.array([1]), biases=biases, activation=gpt_oss)[0, 0].item()
        2.75

    Source:
        Shazeer, "GLU Variants Improve Transformer", 2020.
    """
    options = {"biases": biases, "activation": activation, "recipe": recipe, "pad_token_groups": pad_token_groups}
    return swiglu_ffn(x, w1, w3, w2, group_ends, prob, **options, mx_grad=mx_grad, group_sizes=group_sizes)


@jax.named_scope("mxep.experts")
def swiglu_ffn(
    x: Any, w1: Any, w3: Any, w2: Any, group_ends: Any, prob: jax.Array | None, *, biases: Any, activation: SwiGLU,
    recipe: Recipe | str, pad_token_groups: bool, mx_grad: bool = False, group_sizes: Any = None,
    clear_rest: bool = True,
) -> jax.Array | MXGradArray:  # fmt: skip
    """`grouped_swiglu_ffn`. clear_rest: of `Options`."""
    op, recipe = "grouped_swiglu_ffn", resolve_compute("grouped_swiglu_ffn", recipe)
    SwiGLU.check(op, activation)
    check_type(op, "mx_grad", mx_grad, bool)
    check_type(op, "pad_token_groups", pad_token_groups, bool)
    of_products = _checked_biases(op, x, {"w1": w1, "w3": w3, "w2": w2}, Biases.check(op, biases), recipe)
    recipe = without_tokens(recipe, w1)
    group_ends = ends_of(op, group_ends, group_sizes, x, w1.shape[0])
    if prob is not None:
        check_shape(op, "prob", prob, x.shape[:1], "one weight per row", "float32")
    options = Options(format_of(recipe), activation, prob is not None, mx_grad, clear_rest)
    x, w1, w3, w2, prob, of_products = reverse_only(op, (x, w1, w3, w2, prob, of_products))
    check_blocks(op, "x", x.shape[0], group_ends, recipe.wgrad_mx and not pad_token_groups)
    alignment = recipe.alignment if pad_token_groups and recipe.wgrad_mx else 0
    return _padded_ffn(op, x, w1, w3, w2, group_ends, prob, of_products, options, alignment)


def _padded_ffn(op: str, x, w1, w3, w2, group_ends, prob, biases: Biases, options: Options, alignment: int):
    """alignment: rows that groups are padded to for the weight gradient, and unpadded after it; 0 pads none."""
    maps = None
    if alignment:
        x, maps = pad_groups(op, x, group_ends, alignment)
        group_ends, prob = maps.group_ends, _padded_prob(op, prob, biases, maps)
        options = options._replace(clear_rest=False)  # the maps read no row past the last end
    x, w1, w3, w2, group_ends, prob, biases = vary_alike(x, w1, w3, w2, group_ends, prob, biases)
    out = _ffn_jitted(x, w1, w3, w2, group_ends, prob, biases, options)
    return ungather(op, out, maps.row_map, maps.inverse) if maps else out


def _checked_biases(op: str, x: Any, weights: dict[str, Any], biases: Biases, recipe: Recipe) -> Biases:
    """The biases as (G, N) fp32; raises unless they, x and w1, w3, w2 fit each other and the recipe."""
    check_operands(op, x, weights, recipe, "(P, D) and (G, F, D)")
    (groups, hidden, _), dim = weights["w1"].shape, x.shape[1]
    shapes = {"w1": (groups, hidden, dim), "w3": weights["w1"].shape, "w2": (groups, dim, hidden)}
    for name, shape in shapes.items():
        if weights[name].shape != shape:
            got = f"shape {weights[name].shape}"
            fail(ValueError, op, name, got, f"allowed: {shape}, of x (P, D) and w1 (G, F, D)")
    for name in ("w3", "w2"):
        if is_frozen(weights[name]) != is_frozen(weights["w1"]):
            got, allowed = "an array next to frozen weights, or the reverse", "allowed: w1, w3 and w2 frozen, or none"
            fail(ValueError, op, name, got, allowed)
    if recipe.operands != "bf16":
        require_multiple(op, "w1", hidden, BLOCK, "dim 1, F,", "the w2 product quantizes along it")
    sides = zip(biases._fields, biases, (hidden, hidden, dim), strict=True)
    return Biases._make(None if b is None else check_bias(op, name, b, groups, n) for name, b, n in sides)


def _padded_prob(op: str, prob: jax.Array | None, biases: Biases, maps: RowMap) -> jax.Array | None:
    """The weights of padded rows; with b1 or b3 zeros for padding, whose h is not zero by itself."""
    if prob is not None:
        return gather(op, prob[:, None], maps.row_map, maps.inverse)[:, 0]
    if biases.b1 is None and biases.b3 is None:
        return None
    return (maps.row_map >= 0).astype(jnp.float32)
