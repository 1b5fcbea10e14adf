"""The loss of `compute="fold"` on a layer: the rows that its experts would receive, for
core_kernels/policy/numerics.py."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ...core_kernels.launch import fail
from ...core_kernels.policy.numerics import NumericsReport, report
from ...core_kernels.policy.recipe import Recipe
from .. import ops
from ..ops.checks import check_floats
from ..ops.shapes import Float
from ..products.forms.form import MX, AddedBias
from ..products.forms.mx import MXForm
from ..products.weights import FrozenWeights, QuantizedWeights
from ..routing.weighted_combine import weigh_slots
from . import moe
from .moe_layer import route_tokens
from .moe_params import check_params

OP = "numerics_report"


def numerics_report(
    params: moe.Params,
    x: Float[jax.Array, "... D"],
    config: moe.MoEConfig,
    dout: Float[jax.Array, "... D"] | None = None,
) -> NumericsReport:
    """Report the loss of folding the operands of a layer on these tokens: whether to use `compute="exact"` instead.

    The report covers every MXFP8 operand of the routed experts, not of the shared expert, whatever the recipe's
    compute: activations, weights in both orientations, gradients. With recipe "mxfp8" it covers the operands along the
    tokens too. No row is dropped, whatever the capacity, and the choice has no selection bias.

    It runs forward and backward once, eagerly and without `jax.grad`. The host reads two bytes per value of each
    operand and computes the report: some thousand tokens are enough.

    Args:
        params: As for `moe.apply` without a mesh axis.
        x: (..., D) bfloat16 or float32.
        config: Of the layer.
        dout: The gradient of the layer's output, like x; None draws normal values from a fixed seed.

    Returns:
        The report.

    Raises:
        ValueError: For shapes, NaN, and a recipe that folds nothing.
        TypeError: For other dtypes.
        NotImplementedError: Inside of jit, grad and shard_map.

    Example:
        >>> config = moe.MoEConfig(64, 128, 2, RouterConfig(top_k=1), recipe="mxfp8")
        >>> params, tokens = moe.init(jax.random.key(0), config), jax.random.normal(jax.random.key(1), (512, 64))
        >>> numerics_report(params, tokens, config).lossy()
        ()
        >>> channels = jnp.where(jnp.arange(64) < 32, 2.0**16, 1.0)  # the first 32 larger, their weights smaller
        >>> router, experts = params["router"] / channels, dict(params["experts"])
        >>> experts["w1"], experts["w3"] = experts["w1"] / channels, experts["w3"] / channels
        >>> numerics_report({"router": router, "experts": experts}, tokens * channels, config).lossy()
        ('x', 'w1', 'w3')
    """
    recipe, router = _check(params, x, config, dout), dataclasses.replace(config.router, selection_bias=False)
    x_TD = jnp.asarray(x).reshape(-1, config.dim)
    dout = jax.random.normal(jax.random.key(0), x.shape, x.dtype) if dout is None else jnp.asarray(dout)

    _, (experts_TK, probs_TK, _) = route_tokens(params, x_TD, router)
    order, _, counts = ops.sort_by_expert(experts_TK.reshape(-1), config.num_experts)
    maps = ops.row_map(
        counts, num_rows=order.shape[0], num_local_experts=config.num_experts, alignment=recipe.alignment
    )
    ends, slot_P = maps.group_ends, jnp.append(order, -1)[maps.row_map]
    token_P = slot_P // router.top_k  # -1 stays -1
    prob_P = jnp.append(probs_TK.reshape(-1), 0.0)[slot_P]

    sent, from_P = (weigh_slots(x_TD, probs_TK), slot_P) if router.prob_in == "input" else (x_TD, token_P)
    packed = ops.quantize_row_packed(sent.astype(jnp.bfloat16), rounding=recipe.rounding)
    dout_P = ops.permute_rows(dout.reshape(x_TD.shape), token_P).astype(jnp.float32)
    dout_P = dout_P * prob_P[:, None] if router.prob_in == "combine" else dout_P

    form = MXForm("mx", recipe.rounding, recipe.wgrad_mx, upcasts=False)

    def product(x: MX, w: MX, bias: jax.Array | None) -> jax.Array:
        added = None if bias is None else AddedBias(bias.astype(jnp.float32))
        return form.mm(x, w, ends, "bfloat16", added, clear_rest=True)

    experts = params["experts"]
    w1, w3, w2 = (_values_of(experts[name]) for name in ("w1", "w3", "w2"))
    return report(
        ops, np.asarray, product, recipe, config.activation.attributes,
        x=ops.permute_mx(packed, from_P), dout=dout_P.astype(jnp.bfloat16),
        prob=prob_P if router.prob_in == "swiglu" else prob_P[:0], ends=ends,
        weights=(w1, w3, w2), biases=(experts.get("b1"), experts.get("b3")),
    )  # fmt: skip


def _check(params: moe.Params, x: jax.Array, config: moe.MoEConfig, dout: jax.Array | None) -> Recipe:
    if not isinstance(config, moe.MoEConfig):
        fail(TypeError, OP, "config", f"a {type(config).__name__}", "allowed: a MoEConfig")
    recipe = Recipe.parse(config.recipe)
    if not recipe.mx:
        got = f"recipe {recipe.name!r}"
        fail(ValueError, OP, "config", got, "allowed: 'mxfp8' or 'mxfp8_wgrad_with_hp'; others fold nothing")
    for name, value in (("x", x), *((("dout", dout),) if dout is not None else ())):
        check_floats(OP, name, value)
    for name, value in (("params", params), ("x", x), ("dout", dout)):
        if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(value)):
            fail(NotImplementedError, OP, name, "a traced value", "allowed: arrays; call it outside of jit and grad")
    if x.ndim < 1 or x.shape[-1] != config.dim:
        fail(ValueError, OP, "x", f"shape {x.shape}", f"allowed: (..., {config.dim})")
    if dout is not None and dout.shape != x.shape:
        fail(ValueError, OP, "dout", f"shape {dout.shape}", f"allowed: {x.shape}, x's")
    check_params(OP, params, config)
    weights = {name: _values_of(w) for name, w in (("router", params["router"]), *params["experts"].items())}
    for name, value in {**weights, "x": x, "dout": dout}.items():
        if value is not None and not jnp.isfinite(value).all():
            fail(ValueError, OP, name, "NaN or infinity", "allowed: finite values; other values have no SQNR")
    return recipe


def _values_of(w: jax.Array | QuantizedWeights) -> jax.Array:
    if isinstance(w, FrozenWeights):
        return w.dequantize()
    return w.values if isinstance(w, QuantizedWeights) else w
