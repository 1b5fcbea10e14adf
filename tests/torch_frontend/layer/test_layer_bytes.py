"""What a step of the MoE layer moves and saves, counted, is what benchmarks/layer_bytes.py says; a layer that
recomputes gives the same bytes."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from mxep.core_kernels.policy.recipe import RECIPES, Recipe
from mxep.torch_frontend import MoE, MXTensor, SharedExpert
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.cases.shapes import H200, MoELayer
from benchmarks.layer_bytes import passes, saved_nbytes
from benchmarks.peers import moe_layer as peer

from ...layer_options import layer_options

# The shapes of the documents: tokens / 256, D and F / 32 up to a multiple of 32.
SHAPES = [MoELayer(t // 256, -(-d // 1024) * 32, -(-f // 1024) * 32, e, k) for t, d, f, e, k in H200.moe_layers]
OTHERS = {"route", "route_bwd", "sort_by_expert", "slot_map", "permute_rows"}
"""Ops that read no rows and no weights of the experts."""


def flat(value: Any) -> list[Tensor]:
    if isinstance(value, tuple | list):
        return [t for v in value for t in flat(v)]
    return [value] if isinstance(value, Tensor) else []


class Moved(TorchDispatchMode):
    """The ops of ours that run, and the bytes of their operands and results."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.namespace == "mxep" and func._opname not in OTHERS:
            self.found.append((func._opname, sum(t.nbytes for t in flat([*args, out]))))
        return out


class PlainGLU(torch.autograd.Function):
    """Saves what torch.compile saves of silu(gate) * up."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise NotImplementedError


def layer_of(shape: MoELayer, recipe: Recipe | str = "mxfp8", **options: Any) -> tuple[MoE, Tensor]:
    torch.manual_seed(0)
    options = layer_options(shape.top_k, **options)
    moe = MoE(
        shape.dim, shape.hidden_dim, shape.num_experts, recipe=Recipe.parse(recipe), dtype=torch.bfloat16, **options
    )
    with torch.no_grad():
        for p in moe.parameters():
            p.add_(0.1 * torch.randn_like(p))  # a parameter that was never written may be one that FSDP2 gathered
    return moe, torch.randn(shape.tokens, shape.dim).bfloat16().requires_grad_()


def folded() -> Recipe:
    return Recipe.parse("mxfp8", compute="fold")


def saved(run: Callable[[], object], parameters: Sequence[Tensor]) -> int:
    """Bytes of memory that the forward keeps, without the parameters."""
    kept = {p.untyped_storage().data_ptr(): (0, p) for p in parameters}

    def pack(t: Tensor) -> Tensor:
        for part in (getattr(t, name) for name in t.__tensor_flatten__()[0]) if isinstance(t, MXTensor) else [t]:
            storage = part.untyped_storage()
            kept.setdefault(storage.data_ptr(), (storage.nbytes(), part))
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        result = run()
    del result
    return sum(nbytes for nbytes, _ in kept.values())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_the_forward_saves(shape: MoELayer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "_swiglu", lambda: PlainGLU.apply)
    moe, x = layer_of(shape, folded())
    parameters = list(moe.parameters())
    plain = peer.Weights(moe.router.weight, moe.experts.w1, moe.experts.w3, moe.experts.w2)
    assert saved(lambda: peer.torch_layer(x, plain, shape.top_k), parameters) == sum(saved_nbytes(shape, "plain"))
    assert saved(lambda: moe(x), parameters) == sum(saved_nbytes(shape, "mxfp8"))
    again, x = layer_of(shape, folded(), recompute=True)
    assert saved(lambda: again(x), list(again.parameters())) == sum(saved_nbytes(shape, "recompute"))


@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("shape", SHAPES[1:3], ids=str)
def test_what_each_kernel_moves(shape: MoELayer, gathered: bool) -> None:
    moe, x = layer_of(shape, folded())
    if gathered:
        for name in ("w1", "w3", "w2"):  # a version of 0, as FSDP2's parameters have
            setattr(moe.experts, name, nn.Parameter(getattr(moe.experts, name).detach().clone()))
    with Moved() as moved:
        moe(x)[0].backward(torch.ones_like(x))
    assert moved.found == [(p.op, p.nbytes - p.again) for p in passes(shape, gathered)]


def step(moe: MoE, x: Tensor) -> list[Tensor]:
    """y, the gradient of x and the gradients of the parameters."""
    x.grad = None
    moe.zero_grad()
    y, _ = moe(x)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype))
    assert x.grad is not None
    return [y, x.grad, *(p.grad for p in moe.parameters() if p.grad is not None)]


RUNS = RECIPES | {"mxfp8 folded": folded()}


@pytest.mark.parametrize(("run", "prob_in"), [*((run, "swiglu") for run in RUNS), ("mxfp8 folded", "combine")])
def test_recomputation_gives_the_same_bytes(run: str, prob_in: Any) -> None:
    shape = MoELayer(50, 64, 96, 4, 2)
    options = {"prob_in": prob_in, "bias": True, "shared": SharedExpert(32)}
    results = []
    for recompute in (False, True):
        moe, x = layer_of(shape, RUNS[run], recompute=recompute, **options)
        results.append(step(moe, x))
        with moe.cached_weights():
            results[-1] += step(moe, x)
        for w in (moe.experts.w1, moe.experts.w2):
            w.requires_grad_(False)
        results[-1] += step(moe, x)
    assert len(results[0]) == len(results[1])
    assert all(map(torch.equal, *results))
