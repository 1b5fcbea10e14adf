"""A dense layer: `torch.nn.Linear` whose products run with a recipe, alone or sharded over a mesh.

    weight                      x               out                 gradient of x     torch's style
    a tensor                    a tensor        a tensor            a tensor          none, or FSDP2
    DTensor, Shard(0)           Replicate()     Shard(-1)           Partial()         ColwiseParallel
    DTensor, Shard(1)           Shard(-1)       Partial()           Shard(-1)         RowwiseParallel
    DTensor, Replicate()        rows sharded    as x                as x              SequenceParallel and others

A rank quantizes what it multiplies: parts of 32 values have one scale on any rank, and a folded row one on each rank.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from ...core_kernels.launch import fail
from ...core_kernels.policy.recipe import Recipe
from ..ops.checks import check_flag
from ..products.linear import SharedRows, checked_linear
from ..products.weights import QuantizedWeights
from .cached_weights import CachedWeights, opened, without_blocks
from .experts import check_sizes

OP = "MXLinear"


class MXLinear(nn.Linear):
    """`torch.nn.Linear` with a recipe: y = x weight^T + bias. Parameters, their names and initial values are the same.

    Args:
        in_features: K, a positive multiple of 32.
        out_features: N, a positive multiple of 32.
        bias: Whether there is a bias (N,).
        device: Of the parameters.
        dtype: Of the parameters.
        recipe: A Recipe or its name: "mxfp8", "mxfp8_wgrad_with_hp", "fp8_rowwise", "fp8_blockwise" or "bf16".

    Raises:
        ValueError: For sizes and recipes that are not allowed.
        TypeError: For values of another type.

    The forward is `linear(x, weight, bias, recipe=recipe)`: x (..., K) bfloat16 or float32 -> (..., N) of x's dtype, or
    of bfloat16 within torch.autocast to it. `convert_linear` makes MXLinear of the Linear layers of a model. FSDP2
    (`fully_shard`), `ColwiseParallel`, `RowwiseParallel`, torch.compile and activation checkpointing take it as they
    take `torch.nn.Linear`.

    Example:
        >>> MXLinear(32, 64)(torch.ones(2, 5, 32)).shape
        torch.Size([2, 5, 64])
    """

    recipe: Recipe
    shared_rows: SharedRows | None = None
    """The operands of x, of layers that read the same x one after the other: set by `convert_linear`."""
    _held: CachedWeights | None = None
    """Of the innermost open block of `cached_weights`."""
    _blocks: tuple[CachedWeights, ...] = ()
    """Of all open blocks, in the order in which they began."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        recipe: Recipe | str = "mxfp8",
    ) -> None:
        check_sizes(OP, {"in_features": in_features, "out_features": out_features}, {})
        check_flag(OP, "bias", bias)
        super().__init__(in_features, out_features, bias, device, dtype)
        self.recipe = Recipe.parse(recipe)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, recipe={self.recipe.name!r}"

    def forward(self, x: Tensor) -> Tensor:
        """Multiply x by the weight.

        Args:
            x: (..., K) bfloat16 or float32; a DTensor if the weight is one.

        Returns:
            (..., N) of x's dtype, or of bfloat16 within torch.autocast to it.

        Raises:
            ValueError: shapes.
            TypeError: dtypes, a plain x with a DTensor weight and the reverse.

        Example:
            >>> MXLinear(32, 64, bias=False, dtype=torch.bfloat16)(torch.ones(3, 32, dtype=torch.bfloat16)).dtype
            torch.bfloat16
        """
        if isinstance(self.weight, DTensor) or isinstance(x, DTensor):
            return multiply_on_mesh(x, self.weight, self.bias, self._multiply)
        return self._multiply(x, self.weight, self.bias, self.shared_rows)

    def _multiply(self, x: Tensor, w: Tensor, bias: Tensor | None, shared: SharedRows | None = None) -> Tensor:
        weights: Tensor | QuantizedWeights = w
        if self._held is not None:
            (weights,) = self._held.weights_of((self.weight,), (w[None],))
        return checked_linear(OP, x, weights, bias, self.recipe, None, shared)

    @contextmanager
    def cached_weights(self) -> Iterator[None]:
        """Quantize the weight once, at the beginning of the block, instead of in every call.

        For microbatches of one optimizer step, evaluation and serving, as `GroupedExperts.cached_weights`.

        Returns:
            A context manager.

        Raises:
            ValueError: For a DTensor, which FSDP gathers in every call.
            RuntimeError: In calls and at the end of the block, if a version counter shows a write to the weight.

        Example:
            >>> layer = MXLinear(32, 64)
            >>> with layer.cached_weights():
            ...     y = layer(torch.ones(3, 32))
        """
        if isinstance(self.weight, DTensor):
            got = f"a DTensor with {self.weight.placements}"
            fail(ValueError, "cached_weights", "weight", got, "allowed: a plain weight, all of which this rank has")
        cached = CachedWeights.of({"weight": self.weight}, (self.weight[None],), self.recipe)
        with opened(self, cached):
            yield
        cached.check((self.weight,))

    def __getstate__(self) -> dict[str, Any]:
        return without_blocks(self)


def multiply_on_mesh(
    x: Tensor, weight: Tensor, bias: Tensor | None, multiply: Callable[[Tensor, Tensor, Tensor | None], Tensor]
) -> Tensor:
    """x (..., K) and weight (N, K), DTensors of one mesh dim, -> (..., N), a DTensor; see the table at the top."""
    for name, given in (("x", x), ("weight", weight), ("bias", bias)):
        if given is not None and not isinstance(given, DTensor):
            allowed = (
                "allowed: x, weight and bias all DTensors, as ColwiseParallel and RowwiseParallel make them, or none"
            )
            fail(TypeError, OP, name, "a plain tensor with others that are DTensors", allowed)
    x, weight, mesh = cast(DTensor, x), cast(DTensor, weight), cast(DTensor, weight).device_mesh
    if mesh.ndim != 1:
        got, hint = f"a DTensor on a mesh of {mesh.ndim} dims", "a parent module under fully_shard gathers FSDP2's dim"
        fail(ValueError, OP, "weight", got, "allowed: one dim, of tensor parallelism", hint=hint)
    (placement,), last = weight.placements, x.dim() - 1
    shape = torch.Size((*x.shape[:-1], weight.shape[0]))
    if placement.is_shard(0):
        rows = x.redistribute(mesh, [Replicate()]).to_local(grad_placements=[Partial()])
        out = multiply(rows, weight.to_local(), None if bias is None else cast(DTensor, bias).to_local())
        return _on_mesh(out, weight, Shard(last), shape)
    if placement.is_shard(1):
        rows = x.redistribute(mesh, [Shard(last)]).to_local()
        return _on_mesh(multiply(rows, weight.to_local(), _on_first(bias)), weight, Partial(), shape)
    if not placement.is_replicate():
        fail(ValueError, OP, "weight", f"a DTensor with {placement}", "allowed: Shard(0), Shard(1) or Replicate()")
    if not any(x.placements[0].is_shard(dim) for dim in range(last)):
        x = x.redistribute(mesh, [Replicate()])
    grads = [Partial() if x.placements[0].is_shard() else Replicate()]
    w, b = (None if p is None else cast(DTensor, p).to_local(grad_placements=grads) for p in (weight, bias))
    return _on_mesh(multiply(x.to_local(), cast(Tensor, w), b), weight, x.placements[0], shape)


def _on_mesh(out: Tensor, weight: DTensor, placement: Any, shape: torch.Size) -> DTensor:
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(out, weight.device_mesh, [placement], run_check=False, shape=shape, stride=stride)


def _on_first(bias: Tensor | None) -> Tensor | None:
    """The bias of partial sums: itself on the first rank, zeros on the others. The sum of its gradients is its own."""
    if bias is None:
        return None
    part = cast(DTensor, bias)
    first = part.device_mesh.get_local_rank() == 0
    return part.to_local(grad_placements=[Partial()]) * float(first)
