"""python -m benchmarks.models.layer_recipes: the layer in other recipes, forward and backward, against `mxfp8`.

All recipes of a size run on the same parameters and tokens, alternating in one process, back to back as in training. A
line of the table is a size and a recipe: ms, speed and peak memory relative to `mxfp8`, and the least
SQNR of y and the gradients against a plain bf16 layer. About two minutes on an H200.
"""

import gc

import torch
from mxep.core_kernels.policy.recipe import Recipe

from ..cases.moe_layer import RECIPE, check, layer_inputs, layer_of_recipe, plain_torch_layer, torch_programs
from ..cases.shapes import H200, TINY, MoELayer
from ..clocks import device_timing

RECIPES = {
    "mxfp8": RECIPE,
    "fp8_blockwise": "fp8_blockwise",
    "fp8_blockwise, bf16 weight gradients": Recipe.parse("fp8_blockwise", wgrad_with_hp=True),
    "bf16": "bf16",
}
SHAPES = (*H200.moe_layers, MoELayer(12288, 3072, 1536, 48, 4))
OP = "moe_layer_fwd_bwd"


def measure(shape: MoELayer, device: str) -> None:
    """Print the lines of a size; raise AssertionError if a result is too far from bf16."""
    inputs = layer_inputs(shape, device)
    reference = torch_programs(plain_torch_layer(inputs, torch.float32), inputs)[OP]()
    steps = {name: torch_programs(layer_of_recipe(inputs, of), inputs)[OP] for name, of in RECIPES.items()}
    errors = {name: check(inputs, reference, step()) for name, step in steps.items()}
    del reference
    peaks = {name: device_timing.peak_nbytes(step) for name, step in steps.items()}
    end = device_timing.torch_end(device)
    samples = device_timing.in_a_row({name: (step, end) for name, step in steps.items()})
    for name, sample in samples.items():
        peak, of = peaks[name], peaks["mxfp8"]
        memory = f"peak {peak / 2**30:5.2f} GiB {peak / of:5.2f}" if peak and of else "no peak"
        speed = samples["mxfp8"].us / sample.us
        db = f"{errors[name]['sqnr_db']:.1f} dB of {errors[name]['of']}"
        print(
            f"{tuple(shape)!s:32} {name:37} {sample.us / 1e3:7.2f} ms, speed {speed:5.3f}, {memory}, {db}",
            flush=True,
        )


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for shape in SHAPES if device == "cuda" else TINY.moe_layers:
        measure(shape, device)
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
