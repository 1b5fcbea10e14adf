"""Blocks in which a module's weights are quantized once, instead of in every call.

`with module.cached_weights():` --opened--> module._held, the innermost open block, and module._blocks, all of them
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...core_kernels.launch import fail
from ...core_kernels.policy.recipe import Recipe
from ..exchange.shards import sharded
from ..ops.private import version_of
from ..products.forms.form import WeightOperands
from ..products.weights import QuantizedWeights, quantize_weights

_opening = Lock()
"""For the blocks of a module, which threads may open and end at a time."""


class CachedWeights(NamedTuple):
    """Quantized weights, (G, N, K) each, and the states of their parameters, which change with a write."""

    names: tuple[str, ...]
    quantized: tuple[QuantizedWeights, ...]
    states: tuple[tuple[int, ...], ...]

    @classmethod
    @torch.no_grad()
    def of(cls, parameters: Mapping[str, Tensor], parts: Sequence[Tensor], recipe: Recipe) -> "CachedWeights":
        """parts: (G, N, K), what this rank multiplies of each parameter."""
        quantized = tuple(quantize_weights(part, recipe) for part in parts)
        return cls(tuple(parameters), quantized, tuple(map(_state, parameters.values())))

    def check(self, parameters: Sequence[Tensor]) -> None:
        for name, w, state in zip(self.names, parameters, self.states, strict=True):
            if _state(w) != state:
                allowed = "allowed: none; leave the block, write, and enter it again"
                fail(RuntimeError, "cached_weights", name, "a write within the block", allowed)

    def operands_of(self, name: str, parameter: Tensor) -> WeightOperands:
        """Of the parameter of this name."""
        at = slice(self.names.index(name), self.names.index(name) + 1)
        CachedWeights(self.names[at], self.quantized[at], self.states[at]).check((parameter,))
        (quantized,) = self.quantized[at]
        return WeightOperands(quantized.as_stored, quantized.transposed)

    def weights_of(self, parameters: Sequence[Tensor], values: Sequence[Tensor]) -> tuple[QuantizedWeights, ...]:
        """The cached bytes with `values`, which receive the gradients."""
        if not torch.compiler.is_compiling():
            self.check(parameters)
        return tuple(cached.with_values(w) for cached, w in zip(self.quantized, values, strict=True))


@contextmanager
def opened(module: Any, cached: CachedWeights) -> Iterator[None]:
    """The block of a module. The caller checks the weights after it."""
    with _opening:
        _open(module, (*module._blocks, cached))
    try:
        yield
    finally:
        with _opening:
            _open(module, tuple(other for other in module._blocks if other is not cached))


def _open(module: Any, blocks: tuple[CachedWeights, ...]) -> None:
    module._blocks, module._held = blocks, blocks[-1] if blocks else None


def without_blocks(module: nn.Module) -> dict[str, Any]:
    """The state of a copy and of a saved module: they have weights of their own, and no block that would end."""
    return {name: value for name, value in module.__dict__.items() if name not in ("_held", "_blocks")}


@torch.no_grad()
def _state(parameter: Tensor) -> tuple[int, ...]:
    # A DTensor counts the writes to itself, its local part those through `to_local()`.
    part = sharded(parameter, None)
    return version_of(parameter), version_of(part), part.data_ptr()
