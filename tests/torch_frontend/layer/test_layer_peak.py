"""The peak of a step's memory, counted at the sizes of the documents on torch's meta device, with the scratch memory of
Hopper's kernels: no more than the plain layer's. A backward frees each saved tensor after its last use, unless the
graph is retained."""

import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from mxep.core_kernels.launch import ArrayType
from mxep.core_kernels.policy.recipe import Recipe
from mxep.core_kernels.registry import OPS
from mxep.torch_frontend import MoE, MXTensor, RouterConfig
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.cases.shapes import H200, MoELayer
from benchmarks.peers import moe_layer as peer

FOLD = Recipe.parse("mxfp8", compute="fold")


def scratch_nbytes(func: Any, args: Any) -> int:
    """Of the CUDA kernel of one of our ops, which has it while it runs."""
    if func.namespace != "mxep" or func._opname not in OPS:
        return 0
    op = OPS[func._opname]
    arrays, options = args[: len(op.inputs)], args[len(op.inputs) :]
    types = [ArrayType(tuple(t.shape), str(t.dtype).removeprefix("torch.")) for t in arrays]
    launch = op.launch(*types, arch="sm_90", **dict(zip(op.options, options, strict=False)))
    return sum(math.prod(shape) * getattr(torch, dtype).itemsize for shape, dtype in launch.scratch)


class Live(TorchDispatchMode):
    """Bytes of the tensors that operations have made and that live, and their peak."""

    def __init__(self, *before: Tensor) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.known = weakref.WeakSet(t.untyped_storage() for t in before)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, tuple | list) else [out]:
            for part in (t.q, t.sf) if isinstance(t, MXTensor) else (t,) if isinstance(t, Tensor) else ():
                storage = part.untyped_storage()
                if storage not in self.known:
                    self.known.add(storage)
                    self.now += storage.nbytes()
                    weakref.finalize(storage, self._freed, storage.nbytes())
        self.peak = max(self.peak, self.now + scratch_nbytes(func, args))
        return out

    def _freed(self, nbytes: int) -> None:
        self.now -= nbytes


class PlainProduct(torch.autograd.Function):
    """The memory of a grouped product in bf16, or of silu(gate) * up compiled: both save their operands."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, width: int) -> Tensor:
        ctx.save_for_backward(a, b)
        return a.new_empty(a.shape[0], width)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return *map(torch.empty_like, ctx.saved_tensors), None


def peak(layer: Callable[[Tensor], Tensor], shape: MoELayer, parameters: list[Tensor]) -> int:
    """Of forward and backward, gradients included."""
    x, dy = (torch.empty(shape.tokens, shape.dim, dtype=torch.bfloat16, device="meta") for _ in range(2))
    with Live(x.requires_grad_(), dy, *parameters) as live:
        gradients = torch.autograd.grad(layer(x), [x, *parameters], dy)
    assert live.now == sum(g.nbytes for g in gradients)
    return live.peak


@pytest.mark.parametrize("shape", H200.moe_layers, ids=str)
def test_the_peak_is_not_above_the_plain_layers(shape: MoELayer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "grouped_bf16", lambda x, w, ends: PlainProduct.apply(x, w, w.shape[1]))
    monkeypatch.setattr(peer, "_swiglu", lambda: lambda gate, up: PlainProduct.apply(gate, up, gate.shape[1]))
    monkeypatch.setattr(torch, "histc", lambda x, bins, *_: x.new_empty(bins))  # has no meta kernel
    router = RouterConfig(shape.top_k)
    moe = MoE(shape.dim, shape.hidden_dim, shape.num_experts, router, recipe=FOLD, dtype=torch.bfloat16, device="meta")
    weights = [moe.router.weight, moe.experts.w1, moe.experts.w3, moe.experts.w2]
    with torch.no_grad():
        for w in weights:
            w.zero_()  # a parameter that was never written may be one that FSDP2 gathered
    plain = peak(lambda x: peer.torch_layer(x, peer.Weights(*weights), shape.top_k), shape, weights)
    # Experts wider than the rows: the quantized w1 and w3, which the plain layer does not keep, come on top. At its
    # peak, the gradient of SwiGLU, the backward has freed w2's.
    _, dim, hidden, experts, _ = shape
    kept = 2 * experts * dim * (hidden + 1) if hidden > dim else 0
    assert peak(lambda x: moe(x)[0], shape, weights) - kept <= plain


def test_a_retained_graph_keeps_what_it_saved() -> None:
    torch.manual_seed(0)
    moe, x = MoE(64, 96, 4, RouterConfig(2), recipe=FOLD), torch.randn(50, 64, requires_grad=True)
    y, (inputs, dy) = moe(x)[0], ([x, *moe.parameters()], torch.randn(50, 64))
    first = torch.autograd.grad(y, inputs, dy, retain_graph=True)
    again = torch.autograd.grad(y, inputs, dy)
    assert all(map(torch.equal, first, again))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y, inputs, dy)
