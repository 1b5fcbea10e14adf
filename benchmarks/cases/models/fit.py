"""How many layers of a model fit into a device, from its sizes and from the memory of a micro-batch of one layer.

state       8 bytes per weight: weight, gradient and two moments
saved       of a layer's activations, from its forward until its backward: measured
passing     the rest of a micro-batch's peak: logits, operands and gradients of one layer: measured
"""

from typing import NamedTuple

import torch

from .training import BYTES_PER_WEIGHT, Training

SHARE = 0.9  # of the device's memory


class Memory(NamedTuple):
    """Bytes of a micro-batch of a model with one layer. saved: between forward and backward; peak: saved included."""

    saved: int
    peak: int


def micro_batch_memory(training: Training) -> Memory:
    """Of the implementation in use, on a GPU; the gradients stay."""
    training.accumulate(micro_batches=1)  # compiles, and makes the gradients
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    hidden = training.hidden(training.ids[0, 0, :, :-1])
    saved = torch.cuda.memory_allocated() - before
    del hidden
    torch.cuda.reset_peak_memory_stats()
    training.accumulate(micro_batches=1)
    return Memory(saved, torch.cuda.max_memory_allocated() - before)


def layers_that_fit(total: int, weights: int, weights_of_layer: int, memory: Memory, most: int) -> int:
    """Layers whose peak is at most `SHARE` of `total` bytes, from 1 to `most`. weights: of a model with one layer.

    >>> layers_that_fit(1000, weights=30, weights_of_layer=10, memory=Memory(saved=20, peak=60), most=32)
    7
    """
    free = SHARE * total - BYTES_PER_WEIGHT * weights - memory.peak
    return max(1, min(most, 1 + int(free // (BYTES_PER_WEIGHT * weights_of_layer + memory.saved))))


def print_layers(
    name: str, layers: int, of_layers: int, total: int, weights: int, weights_of_layer: int, memory: Memory
) -> None:
    """The arguments of `layers_that_fit`, its result, and the published number of layers."""
    sizes = {"state of one layer and the vocabulary": BYTES_PER_WEIGHT * weights,
             "state of a layer": BYTES_PER_WEIGHT * weights_of_layer, "its activations": memory.saved,
             "peak of a micro-batch of one layer": memory.peak}  # fmt: skip
    print(f"{name}: {layers} of {of_layers} layers fit into {SHARE:.0%} of {total / 2**30:.1f} GiB;",
          ", ".join(f"{what} {size / 2**30:.1f}" for what, size in sizes.items()), flush=True)  # fmt: skip


def weights_of(training: Training) -> tuple[int, int]:
    """The number of weights of the model, and of its first layer."""
    model = training.model
    return sum(p.numel() for p in model.parameters()), sum(p.numel() for p in model.model.layers[0].parameters())
