"""The size of a compiled layer: how often each kernel is called, and what a program of eight layers has.

`python -m benchmarks.compile_time` measures the seconds; docs/design/jax_compile.md has both.
"""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from mxep.jax_frontend import MoEConfig, RouterConfig, moe

from benchmarks.compile_time import kernels

DIM, TOKENS = 64, 32
ROUTING = {"route": 1, "route_bwd": 1, "sort_by_expert": 1, "row_map": 1, "combine": 2}


def gradient_of(depth: int, recipe: str) -> Any:
    """The lowered value and gradient of `depth` layers."""
    config = MoEConfig(DIM, 96, num_experts=4, router=RouterConfig(top_k=2), recipe=recipe)

    def loss(params: list[Any], x: jax.Array) -> jax.Array:
        for p in params:
            x = x + moe.apply(p, x, config)[0]
        return (x**2).mean()

    params = [jax.eval_shape(lambda: moe.init(jax.random.key(0), config))] * depth
    x = jax.ShapeDtypeStruct((TOKENS, DIM), jnp.float32)
    return jax.jit(jax.value_and_grad(loss, (0, 1))).lower(params, x)


@pytest.mark.parametrize(
    ("recipe", "calls"),
    [
        ("bf16", {"permute_rows": 4, "swiglu": 1, "swiglu_bwd": 1}),
        (
            "mxfp8_wgrad_with_hp",
            {"permute_rows": 2, "permute_mx": 2, "quantize_both": 3, "quantize_row": 2, "quantize_row_packed": 2}
            | {"swiglu_row": 1, "swiglu": 1, "swiglu_bwd": 1, "dequantize": 13},
        ),
        (
            "mxfp8",
            {"permute_rows": 2, "permute_mx": 2, "quantize_both": 3, "quantize_col": 2, "quantize_row_packed": 2}
            | {"swiglu_row": 1, "swiglu_bwd_all": 1, "dequantize": 18},
        ),
    ],
)
def test_the_kernels_of_a_layer(recipe: str, calls: dict[str, int]) -> None:
    """Forward and backward, as the table of docs/design/jax_compile.md counts them."""
    assert kernels(gradient_of(1, recipe).compile().as_text()) == ROUTING | calls


def test_equal_layers_share_what_is_lowered() -> None:
    """A layer after the first adds an eighth of the first one: XLA reads one function per product and kernel."""
    one, two, eight = (gradient_of(depth, "mxfp8").as_text().count("\n") for depth in (1, 2, 8))
    # Measured: 965 lines, 1076 with two, 1742 with eight: 0.12 of the first each. The margin is up to a quarter.
    assert two - one < one / 4
    assert eight - one < 7 * one / 4
