"""The whole Mixture-of-Experts layer on one device: inputs, programs of both frontends, and the check.

    moe_layer_fwd       x -> y, without gradients
    moe_layer_fwd_bwd   x, dy -> y and the gradients of x, router, w1, w3, w2
    sonic_moe_fwd_bwd   the same, against SonicMoE's layer

Weights are bf16 and quantized in every step; `held` weights are quantized once, before.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import torch
from mxep import jax_frontend, torch_frontend
from mxep.core_kernels.policy.recipe import Recipe
from torch import Tensor

from ..peers.moe_layer import Weights, torch_layer
from ..peers.sonic_moe import reference_layer
from .case import Tensors, values
from .chosen_experts import logits
from .error_check import Error, sqnr_db
from .shapes import MoELayer

OPS = ("moe_layer_fwd", "moe_layer_fwd_bwd")
SONIC_OP = "sonic_moe_fwd_bwd"
"""An op of its own: its lines are one run, and a kernel of another package that fails takes the GPU's context away."""
OUTPUTS = ("y", "x", "router", "w1", "w3", "w2")
RECIPE = "mxfp8"
# y and every gradient against the plain bf16 layer with an fp32 router: at least 22.7 dB measured on a CPU, over five
# shapes, "exact" and "fold"; less 1.7.
MIN_SQNR_DB = 21.0
# On an H200 at least 44.7 dB, of four sizes; less 4.7. MXFP8 has 23 dB.
MIN_SONIC_DB = 40.0

JaxProgram = tuple[Callable[..., tuple[jax.Array, ...]], tuple[Any, ...]]
"""A compiled program and its arguments."""


class LayerInputs(NamedTuple):
    """x, dy (T, D) bf16, x a leaf; ours: the torch layer; weights: its parameters. routing: a RoutedLayer's."""

    shape: MoELayer
    routing: str
    x: Tensor
    dy: Tensor
    ours: torch_frontend.MoE
    weights: Weights


def layer_inputs(shape: MoELayer, device: str, recipe: Recipe | str = RECIPE, routing: str = "random") -> LayerInputs:
    """Normal values; the deviation of a weight is 1 / sqrt(fan in).

    With a routing of chosen_experts.py the router is the identity on the first E values of x, which are logits.
    """
    t, d, f, e, k = shape
    x, dy = values(2, t, d, device=device, octaves=0.5)
    ours = torch_frontend.MoE(
        d, f, e, torch_frontend.RouterConfig(k), recipe=recipe, dtype=torch.bfloat16, device=device
    )
    weights = Weights(ours.router.weight, ours.experts.w1, ours.experts.w3, ours.experts.w2)
    with torch.no_grad():
        for i, w in enumerate(weights, 1):
            w.copy_(values(*w.shape, device=device, octaves=0.5, operand=i).mul_(w.shape[-1] ** -0.5))
        if routing != "random":
            weights.router.copy_(torch.eye(e, d))
            x[:, :e] = torch.from_numpy(logits(routing, t, e, k, rank=0)).to(x)
    return LayerInputs(shape, routing, x.clone().requires_grad_(), dy.clone(), ours, weights)


def flops(shape: MoELayer, op: str) -> int:
    """2 per multiplication and addition of the experts' products: three of them forward, six backward."""
    products = 3 if op == "moe_layer_fwd" else 9
    return 2 * products * shape.tokens * shape.top_k * shape.dim * shape.hidden_dim


def torch_programs(layer: Callable[[Tensor], Tensor], inputs: LayerInputs) -> dict[str, Callable[[], Tensors]]:
    """By op: the program of a torch layer, ours or plain."""

    def forward() -> Tensors:
        with torch.no_grad():
            return (layer(inputs.x),)

    def forward_and_backward() -> Tensors:
        y = layer(inputs.x)
        return (y.detach(), *torch.autograd.grad(y, (inputs.x, *inputs.weights), inputs.dy))

    return dict(zip(OPS, (forward, forward_and_backward), strict=True))


def our_torch_layer(inputs: LayerInputs) -> Callable[[Tensor], Tensor]:
    return lambda x: inputs.ours(x)[0]


def recipe_bf16_layer(inputs: LayerInputs) -> Callable[[Tensor], Tensor]:
    return layer_of_recipe(inputs, "bf16")


def layer_of_recipe(inputs: LayerInputs, recipe: Recipe | str) -> Callable[[Tensor], Tensor]:
    """Our torch layer with another recipe, on the same parameters."""
    _, d, f, e, k = inputs.shape
    router = torch_frontend.RouterConfig(k)
    layer = torch_frontend.MoE(d, f, e, router, recipe=recipe, dtype=torch.bfloat16, device="meta")
    layer.router.weight, experts = inputs.ours.router.weight, layer.experts
    experts.w1, experts.w3, experts.w2 = inputs.ours.experts.w1, inputs.ours.experts.w3, inputs.ours.experts.w2
    if left := [name for name, tensor in layer.state_dict().items() if tensor.is_meta]:
        raise AssertionError(f"layer_of_recipe: {', '.join(left)}: on device meta; expected the layer's tensors")
    return lambda x: layer(x)[0]


def plain_torch_layer(inputs: LayerInputs, router_dtype: torch.dtype = torch.bfloat16) -> Callable[[Tensor], Tensor]:
    return lambda x: torch_layer(x, inputs.weights, inputs.shape.top_k, router_dtype)


def jax_program(
    layer: Callable[[jax.Array, Any], jax.Array], op: str, x: jax.Array, dy: jax.Array, weights: Any
) -> JaxProgram:
    """The op's program for a JAX layer (x, weights) -> y. Quantized bytes have no gradient and are left out."""

    def forward(x: jax.Array, dy: jax.Array, weights: Any) -> tuple[jax.Array, ...]:
        return (layer(x, weights),)

    def forward_and_backward(x: jax.Array, dy: jax.Array, weights: Any) -> tuple[jax.Array, ...]:
        y, vjp = jax.vjp(layer, x, weights)
        gradients = jax.tree.leaves(vjp(dy))
        return (y, *(g for g in gradients if g.dtype != jax.dtypes.float0))

    arguments = (x, dy, weights)
    program = forward if op == "moe_layer_fwd" else forward_and_backward
    return jax.jit(program).lower(*arguments).compile(), arguments


def our_jax_program(inputs: LayerInputs, op: str, held: bool) -> JaxProgram:
    """Ours in JAX, on the memory of the torch inputs."""
    _, d, f, e, k = inputs.shape
    config = jax_frontend.MoEConfig(d, f, e, jax_frontend.RouterConfig(k), recipe=inputs.ours.experts.recipe)
    x, dy, router, *experts = (jax.dlpack.from_dlpack(a.detach()) for a in (inputs.x, inputs.dy, *inputs.weights))
    if held:
        experts = [jax_frontend.quantize_weights(w, recipe=config.recipe) for w in experts]

    def layer(x: jax.Array, weights: Any) -> jax.Array:
        router, w1, w3, w2 = weights
        return jax_frontend.moe.apply({"router": router, "experts": {"w1": w1, "w3": w3, "w2": w2}}, x, config)[0]

    return jax_program(layer, op, x, dy, (router, *experts))


def check(inputs: LayerInputs, reference: Tensors, outputs: Tensors, least_db: float = MIN_SQNR_DB) -> Error:
    """SQNR of every output against the reference. Raises AssertionError below the limit."""
    with torch.no_grad():
        ends = torch.cumsum(inputs.ours(inputs.x)[1].counts, 0)
    names = OUTPUTS[: len(outputs)]
    db = {name: sqnr_db([a], [b], ends) for name, a, b in zip(names, outputs, reference, strict=True)}
    least = min(db, key=lambda name: db[name])
    if not db[least] >= least_db:
        what = f"moe_layer {tuple(inputs.shape)}: {least}"
        raise AssertionError(f"{what}: {db[least]} dB from bf16; expected {least_db} or more")
    return {"grade": "sqnr_db", "sqnr_db": db[least], "of": least}


def check_sonic(inputs: LayerInputs, outputs: Tensors) -> Error:
    """As `check`, of SonicMoE's outputs against the plain layer with the experts that SonicMoE selects."""
    plain = torch_programs(lambda x: reference_layer(x, inputs.weights, inputs.shape.top_k), inputs)
    return check(inputs, plain["moe_layer_fwd_bwd"](), outputs, MIN_SONIC_DB)
