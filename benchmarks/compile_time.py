"""`python -m benchmarks.compile_time`: the time in which JAX compiles forward and backward of a layer, for a CPU.

one layer, or eight unrolled ones --trace--> jaxpr --lower--> StableHLO --XLA--> program
ours and the plain layer on jax.lax.ragged_dot alternate; medians of CPU seconds of all threads, which other processes
of the machine disturb less than the clock; docs/design/jax_compile.md quotes the output
"""

import dataclasses
import re
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from mxep.jax_frontend import MoEConfig, RouterConfig, moe

from .peers.moe_layer import jax_layer

CONFIG = MoEConfig(256, 512, num_experts=8, router=RouterConfig(top_k=2))
TOKENS = 1024
RECIPES = ("mxfp8", "mxfp8_wgrad_with_hp", "bf16")
STEPS = ("trace", "lower", "compile")

Layer = Callable[[Any, jax.Array], jax.Array]


def plain(params: Any, x: jax.Array) -> jax.Array:
    """`jax_layer` with the parameters of `moe.init`, cast to bf16 for each call as ours are."""
    experts = {name: w.astype(jnp.bfloat16).mT for name, w in params["experts"].items()}
    weights = params["router"].astype(jnp.bfloat16), experts["w1"], experts["w3"], experts["w2"]
    return jax_layer(x.astype(jnp.bfloat16), weights, CONFIG.router.top_k).astype(x.dtype)


def ours(recipe: str, params: Any, x: jax.Array) -> jax.Array:
    return moe.apply(params, x, dataclasses.replace(CONFIG, recipe=recipe))[0]


LAYERS: dict[str, Layer] = {"jax.lax.ragged_dot": plain, **{recipe: partial(ours, recipe) for recipe in RECIPES}}


def program(layer: Layer, depth: int) -> tuple[dict[str, float], str]:
    """The CPU seconds of each step for `depth` layers, each with its own parameters, and the compiled text."""

    def loss(params: list[Any], x: jax.Array) -> jax.Array:  # a new function: JAX caches nothing of it
        for p in params:
            x = x + layer(p, x)
        return (x**2).mean()

    params = [jax.eval_shape(lambda: moe.init(jax.random.key(0), CONFIG))] * depth
    x = jax.ShapeDtypeStruct((TOKENS, CONFIG.dim), jnp.float32)
    marks = [time.process_time()]
    traced = jax.jit(jax.value_and_grad(loss, (0, 1))).trace(params, x)
    marks.append(time.process_time())
    lowered = traced.lower()
    marks.append(time.process_time())
    compiled = lowered.compile()
    marks.append(time.process_time())
    return dict(zip(STEPS, np.diff(marks).tolist(), strict=True)), str(compiled.as_text())


def kernels(text: str) -> Counter[str]:
    """The custom calls of this package in a compiled program, by op."""
    return Counter(re.findall(r'custom_call_target="mxep\.(\w+)"', text))


def main(rounds: int = 7) -> None:
    print("| layer | layers | trace, s | lower, s | compile, s | sum, s | of ragged_dot | calls of kernels |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for depth in (1, 8):
        times: dict[str, list[list[float]]] = {name: [] for name in LAYERS}
        calls = dict.fromkeys(LAYERS, 0)
        for round_ in range(rounds + 1):
            for name, layer in LAYERS.items():
                seconds, text = program(layer, depth)
                calls[name] = kernels(text).total()
                if round_:  # the first one traces jax.numpy too
                    times[name].append(list(seconds.values()))
        reference = 0.0
        for name, rows in times.items():
            total = float(np.median(np.sum(rows, axis=1)))
            reference = reference or total
            steps = " | ".join(f"{median:.2f}" for median in np.median(rows, axis=0))
            print(f"| {name} | {depth} | {steps} | {total:.2f} | {total / reference:.2f} | {calls[name]} |", flush=True)


if __name__ == "__main__":
    main()
