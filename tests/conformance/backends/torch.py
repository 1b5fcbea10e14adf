"""The PyTorch frontend's public functions, on the GPU where there is one."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from mxep import torch_frontend as mxep
from mxep.core_kernels.policy.recipe import Recipe
from mxep.torch_frontend import ops
from mxep.torch_frontend.integrations.torchao import permute_mxfp8_fwd_hp_bwd, unpermute_hp_fwd_mxfp8_bwd

from ...compare import to_numpy
from . import arrays

FP8_TENSOR_CORES = torch.cuda.is_available()
SM90_SUMS = FP8_TENSOR_CORES and torch.cuda.get_device_capability() == (9, 0)
DEVICE = torch.device("cuda" if FP8_TENSOR_CORES else "cpu")
# Ranks without a GPU each are compared with the dense layer of the same device; tests/gpu/exchange/ranks.py has GPUs.
EXPERT_PARALLEL = not FP8_TENSOR_CORES
Array = np.ndarray
Pair = tuple[Array, Array]


def to_torch(x: Array) -> torch.Tensor:
    return arrays.to_torch(x).to(DEVICE)


def run(name: str, *inputs: Array, **options: Any) -> Any:
    results = getattr(ops, name)(*map(to_torch, inputs), **options)
    return tuple(map(to_numpy, results)) if isinstance(results, tuple) else to_numpy(results)


OPS: dict[str, Callable] = {name: partial(run, name) for name in ops.OPS}


def rows(x: Array | Pair) -> torch.Tensor:
    """Floats, or an MXTensor of (q, sf)."""
    return mxep.MXTensor(*map(to_torch, x)) if isinstance(x, tuple) else to_torch(x)


def grouped_mm(
    a: Array | Pair, b_t: Array, group_ends: Array, dout: Array | Pair, recipe: Recipe
) -> tuple[Array, Array, Array]:
    """out (M, N), da (M, K), db_t (G, K, N)."""
    a_ = rows(a).requires_grad_()
    w = to_torch(np.swapaxes(b_t, 1, 2)).requires_grad_()
    out = mxep.grouped_mm(a_, w, to_torch(group_ends), recipe=recipe)
    out.backward(rows(dout))
    return to_numpy(out), to_numpy(a_.grad), np.swapaxes(to_numpy(w.grad), 1, 2)


def linear(x: Array, w: Array, bias: Array | None, dout: Array, recipe: Recipe) -> dict[str, Array]:
    """out (..., N) and the gradients: of x "x" (..., K), of w "w" (N, K), and of bias "bias" if there is one."""
    given = {"x": x, "w": w} | ({} if bias is None else {"bias": bias})
    inputs = {name: to_torch(array).requires_grad_() for name, array in given.items()}
    out = mxep.linear(inputs["x"], inputs["w"], inputs.get("bias"), recipe=recipe)
    out.backward(to_torch(dout))
    return {"out": to_numpy(out)} | {name: to_numpy(value.grad) for name, value in inputs.items()}


def swiglu_ffn(
    x: Array | Pair,
    weights: dict[str, Array],
    group_ends: Array,
    prob: Array | None,
    dout: Array | Pair,
    recipe: Recipe,
    **numbers: float,
) -> dict[str, Array]:
    """out (P, D) and the gradients: of x "x", of "w1", "w3", "w2", of prob "prob" if there is one, and of "b1", "b3",
    "b2" if `weights` has them. numbers: of SwiGLU."""
    inputs = {name: to_torch(array).requires_grad_() for name, array in ({"x": x} | weights | {"prob": prob}).items()}
    ends, activation = to_torch(group_ends), mxep.SwiGLU(**numbers)
    w1, w3, w2 = (inputs[name] for name in ("w1", "w3", "w2"))
    b1, b3, b2 = (inputs.get(name) for name in ("b1", "b3", "b2"))
    options = {"biases": (b1, b3, b2), "recipe": recipe, "activation": activation}
    out = mxep.grouped_swiglu_ffn(inputs["x"], w1, w3, w2, ends, inputs["prob"], **options)
    out.backward(to_torch(dout))
    return {"out": to_numpy(out)} | {name: to_numpy(value.grad) for name, value in inputs.items()}


def permute(x: Array, counts: Array, ranks: int, dout: Array, alignment: int) -> tuple[Array, Array, Array, Array]:
    """x (M, K) to padded groups (P, K) and back; each with its gradient, for `dout` (P, K) and for x."""
    x_, y = to_torch(x).requires_grad_(), to_torch(dout).requires_grad_()
    shape, groups, indices, _, _ = permute_mxfp8_fwd_hp_bwd(
        x_, to_torch(counts), ranks, len(counts) // ranks, group_size_multiple_of=alignment
    )
    groups.backward(to_torch(dout))
    back = unpermute_hp_fwd_mxfp8_bwd(y, indices, shape)
    back.backward(to_torch(x))
    return to_numpy(groups), to_numpy(x_.grad), to_numpy(back), to_numpy(y.grad)


def moe_module(
    params: dict[str, Array], recipe: Recipe, top_k: int, score: str, normalize: bool, prob_in: str
) -> torch.nn.Module:
    num_experts, hidden, dim = params["w1"].shape
    router = mxep.RouterConfig(top_k, score_func=score, normalize=normalize, prob_in=prob_in)
    moe = mxep.MoE(dim, hidden, num_experts, router, recipe=recipe, dtype=torch.float32, device=DEVICE)
    moe.load_state_dict({"router.weight": to_torch(params["router"])} | {
        f"experts.{name}": to_torch(params[name]) for name in ("w1", "w2", "w3")
    })  # fmt: skip
    return moe


def moe(
    x: Array, params: dict[str, Array], dy: Array, recipe: Recipe, **options: Any
) -> tuple[Array, dict[str, Array], dict[str, Array]]:
    """The dense layer: y, its statistics, and the gradients of x and of every parameter."""
    layer, x_ = moe_module(params, recipe, **options), to_torch(x).requires_grad_()
    y, stats = layer(x_)
    y.backward(to_torch(dy))
    grads = {name.rpartition(".")[2]: p.grad for name, p in layer.named_parameters() if "experts" in name}
    grads |= {"x": x_.grad, "router": layer.router.weight.grad}
    return to_numpy(y), _numpy(stats._asdict()), _numpy(grads)


def _numpy(tensors: dict[str, torch.Tensor]) -> dict[str, Array]:
    return {name: to_numpy(t) for name, t in tensors.items()}
