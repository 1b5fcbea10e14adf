"""Layers with the options of a router and a shared expert, and their definition in fp64. It imports no framework."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from mxep.core_kernels.reference import layer
from mxep.core_kernels.reference.choice import Choice

Array = np.ndarray
TOKENS, DIM, HIDDEN, SHARED, EXPERTS, TOP_K = 50, 64, 96, 32, 8, 2


@dataclass(frozen=True)
class RoutedLayer:
    """x, dy (T, D) and parameters in fp32. options: arguments of a frontend's layer except its sizes."""

    x: Array
    dy: Array
    parameters: layer.Parameters
    bias: Array
    options: dict[str, Any]

    def expected(self) -> dict[str, Array]:
        """ "y" and the gradients by name, in fp64; gradients of the shared expert as "shared.w1" and so on."""
        choice = Choice(TOP_K, bias=self.bias, **self.options)
        dx, grads = layer.moe_layer_vjp(self.dy, self.x, self.parameters, choice)
        named = {"router": grads.router, "w1": grads.w1, "w3": grads.w3, "w2": grads.w2}
        shared = dict(zip(("shared.w1", "shared.w3", "shared.w2"), grads.shared, strict=True))
        return {"y": layer.moe_layer(self.x, self.parameters, choice), "x": dx, **named, **shared}


def _layer(seed: int, biased: bool, **options: Any) -> RoutedLayer:
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> Array:
        return (rng.standard_normal(shape) * shape[-1] ** -0.5).astype(np.float32)

    def experts(number: int, hidden: int) -> tuple[Array, Array, Array]:
        return normal(number, hidden, DIM), normal(number, hidden, DIM), normal(number, DIM, hidden)

    parameters = layer.Parameters(normal(EXPERTS, DIM), *experts(EXPERTS, HIDDEN), experts(1, SHARED))
    x, dy = rng.standard_normal((2, TOKENS, DIM)).astype(np.float32)
    bias = (rng.standard_normal(EXPERTS) * 0.3 if biased else np.zeros(0)).astype(np.float32)
    return RoutedLayer(x, dy, parameters, bias, options)


LAYERS = {
    "deepseek_v3": _layer(0, True, score_func="sigmoid", route_scale=2.5, num_groups=4, top_k_groups=2),
    "of_chosen": _layer(1, False, score_func="softmax_of_chosen"),
    "as_it_is": _layer(2, True, normalize=False, num_groups=2, top_k_groups=1, group_score="max"),
}
