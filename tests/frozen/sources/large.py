"""The four layers of the benchmark, forward and backward, on the GPU: in PyTorch, then in JAX on the same memory.

Values are read from a table drawn by numpy. The place of a value in it is a hash of the value's place in its array, in
integers, so that the billion values of a layer are the same everywhere and take no time.
"""

import gc
from functools import partial

import numpy as np
import torch
from mxep.core_kernels.policy.recipe import RECIPES
from mxep.torch_frontend import MoE, RouterConfig

from benchmarks.cases.moe_layer import OUTPUTS, LayerInputs, our_jax_program, our_torch_layer, torch_programs
from benchmarks.cases.shapes import H200, MoELayer
from benchmarks.peers.moe_layer import Weights

from ..hashes import digits_of
from ..records import INPUTS, Case, Entry

OP = "moe_layer_fwd_bwd"
BITS, FACTOR, SHIFT = 20, 0x5851F42D4C957F2D, 40
"""Of the table's size and of the hash, which takes the bits above SHIFT of a product in int64."""
RECIPE, SMALLEST = "mxfp8", H200.moe_layers[-1]


def cases(device: str = "cuda") -> dict[str, Case]:
    """In pairs, so that two processes have a frontend each."""
    runs = [(shape, RECIPE) for shape in H200.moe_layers] + [(SMALLEST, name) for name in RECIPES if name != RECIPE]
    named = {
        f"{frontend} layer {'x'.join(map(str, shape))} {recipe}": (frontend, shape, recipe)
        for shape, recipe in runs
        for frontend in ("torch", "jax")
    }
    return {name: Case("gpu", partial(entry, *run, device)) for name, run in named.items()}


def fill(x: torch.Tensor, operand: int) -> None:
    """bf16, about normal of deviation 1. operand: the index of the array in its layer."""
    drawn = np.random.default_rng(operand).standard_normal(1 << BITS, np.float32)
    table, begin = torch.from_numpy(drawn).to(x.device).bfloat16(), 0
    for part in x.view(-1).split(1 << 24):
        places = torch.arange(begin, begin + len(part), device=x.device)
        places.mul_(FACTOR).bitwise_right_shift_(SHIFT).bitwise_and_((1 << BITS) - 1)
        torch.index_select(table, 0, places, out=part)
        begin += len(part)


def inputs_of(shape: MoELayer, recipe: str, device: str) -> LayerInputs:
    """As the benchmark's; the deviation of a weight is the power of two next to 1 / sqrt(fan in)."""
    t, d, f, e, k = shape
    moe = MoE(d, f, e, RouterConfig(k), recipe=recipe, dtype=torch.bfloat16, device="meta").to_empty(device=device)
    weights = Weights(moe.router.weight, moe.experts.w1, moe.experts.w3, moe.experts.w2)
    x, dy = torch.empty(2, t, d, dtype=torch.bfloat16, device=device)
    with torch.no_grad():
        for operand, array in enumerate((x, dy, *weights)):
            fill(array, operand)
        for w in weights:
            w.mul_(2.0 ** -round(np.log2(w.shape[-1]) / 2))
    return LayerInputs(shape, "random", x.clone().requires_grad_(), dy.clone(), moe, weights)


def entry(frontend: str, shape: MoELayer, recipe: str, device: str) -> Entry:
    inputs = inputs_of(shape, recipe, device)
    some = digits_of(*(array.detach().view(-1)[::1009] for array in (inputs.x, inputs.dy, *inputs.weights)))
    if frontend == "torch":
        outputs = torch_programs(our_torch_layer(inputs), inputs)[OP]()
    else:
        program, arguments = our_jax_program(inputs, OP, held=False)
        outputs = program(*arguments)
        del arguments
    found = {INPUTS: some, **{name: digits_of(x) for name, x in zip(OUTPUTS, outputs, strict=True)}}
    del inputs, outputs
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()  # memory for the next layer in JAX
    return found
