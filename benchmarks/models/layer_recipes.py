"""python -m benchmarks.models.layer_recipes [--graph]: forward and backward of the layer in other recipes than `mxfp8`.

All recipes of a size run on the same parameters and tokens, alternating in one process, back to back as in training. A
line of the table is a size and a recipe: ms, the host's ms to launch a step, speed and peak memory relative to `mxfp8`,
and the least SQNR of y and the gradients against a plain bf16 layer. "4 micro-batches" are four steps in a block of
`cached_weights`, which quantizes the weights once; its times are a step's. --graph: every step is captured, so that no
host binds a small layer; without peaks. About two minutes on an H200.
"""

import argparse
import gc
from collections.abc import Callable

import torch
from mxep.core_kernels.policy.recipe import Recipe

from ..cases.case import Tensors
from ..cases.moe_layer import (
    RECIPE,
    LayerInputs,
    check,
    layer_inputs,
    layer_of_recipe,
    our_torch_layer,
    plain_torch_layer,
    torch_programs,
)
from ..cases.shapes import H200, TINY, MoELayer
from ..clocks import device_timing
from ..gpu_moe_layer import captured

RECIPES = {
    "mxfp8": RECIPE,
    "fp8_blockwise": "fp8_blockwise",
    "fp8_blockwise, bf16 weight gradients": Recipe.parse("fp8_blockwise", wgrad_with_hp=True),
    "bf16": "bf16",
}
MICRO_BATCHES = 4
HELD = f"mxfp8, {MICRO_BATCHES} micro-batches"
SHAPES = (*H200.moe_layers, MoELayer(12288, 3072, 1536, 48, 4))
OP = "moe_layer_fwd_bwd"


def micro_batches(inputs: LayerInputs) -> Callable[[], Tensors]:
    """Steps of `mxfp8` whose weights are quantized once; the results of the last one."""
    step = torch_programs(our_torch_layer(inputs), inputs)[OP]

    def steps() -> Tensors:
        with inputs.ours.cached_weights():
            for _ in range(MICRO_BATCHES - 1):
                step()
            return step()

    return steps


def measure(shape: MoELayer, device: str, graph: bool) -> None:
    """Print the lines of a size; raise AssertionError if a result is too far from bf16."""
    inputs = layer_inputs(shape, device)
    reference = torch_programs(plain_torch_layer(inputs, torch.float32), inputs)[OP]()
    runs = {name: torch_programs(layer_of_recipe(inputs, of), inputs)[OP] for name, of in RECIPES.items()}
    runs[HELD] = micro_batches(inputs)
    replays = {name: captured(run) for name, run in runs.items()} if graph else {}
    steps = {name: replay for name, (replay, *_) in replays.items()} or runs
    errors = {}
    for name, step in steps.items():
        outputs = step()
        errors[name] = check(inputs, reference, replays[name][1] if graph else outputs)  # type: ignore[arg-type]
        del outputs
    del reference
    peaks = {name: None if graph else device_timing.peak_nbytes(step) for name, step in steps.items()}
    end = device_timing.torch_end(device)
    samples = device_timing.in_a_row({name: (step, end) for name, step in steps.items()})
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    launched = device_timing.host(steps, wait, stretches=3, calls=4)
    parts = {name: MICRO_BATCHES if name == HELD else 1 for name in steps}
    us, host_us = ({name: sample.us / parts[name] for name, sample in of.items()} for of in (samples, launched))
    for name, sample in samples.items():
        peak, of = peaks[name], peaks["mxfp8"]
        memory = f"peak {peak / 2**30:5.2f} GiB {peak / of:5.2f}" if peak and of else "no peak"
        db = f"{errors[name]['sqnr_db']:.1f} dB of {errors[name]['of']}"
        print(
            f"{tuple(shape)!s:32} {name:37} {us[name] / 1e3:7.2f} ms, n {sample.n}, spread {sample.spread:.0%}, "
            f"host {host_us[name] / 1e3:.2f} ms, "
            f"speed {us['mxfp8'] / us[name]:5.3f}, of bf16 {us['bf16'] / us[name]:5.3f}, {memory}, {db}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.models.layer_recipes", description=__doc__)
    parser.add_argument("--graph", action="store_true", help="steps in a CUDA graph")
    graph = parser.parse_args().graph
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for shape in SHAPES if device == "cuda" else TINY.moe_layers:
        measure(shape, device, graph)
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
