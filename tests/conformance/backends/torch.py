"""The PyTorch frontend's public functions, on the GPU where there is one."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from mxep import torch_frontend as mxep
from mxep.core_kernels.recipe import Recipe
from mxep.torch_frontend import ops

from ..layers import RUNS
from . import arrays

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
Array = np.ndarray
Pair = tuple[Array, Array]


def to_torch(x: Array) -> torch.Tensor:
    return arrays.to_torch(x).to(DEVICE)


def to_numpy(x: torch.Tensor) -> Array:
    return arrays.to_numpy(x.cpu())


def run(name: str, *inputs: Array, **options: Any) -> Any:
    results = getattr(ops, name)(*map(to_torch, inputs), **options)
    return tuple(map(to_numpy, results)) if isinstance(results, tuple) else to_numpy(results)


OPS: dict[str, Callable] = {name: partial(run, name) for name in ops.OPS}


def mx(pair: Pair) -> torch.Tensor:
    return mxep.MXTensor(*map(to_torch, pair))


def grouped_mm(
    a: Array | Pair, b_t: Array, group_ends: Array, dout: Array | Pair, run: str, rounding: str = "rceil"
) -> tuple[Array, Array, Array]:
    """out (M, N), da (M, K), db_t (G, K, N); `a` and `dout` are floats or MX pairs."""
    a_ = (mx(a) if isinstance(a, tuple) else to_torch(a)).requires_grad_()
    w = to_torch(np.swapaxes(b_t, 1, 2)).requires_grad_()
    recipe = Recipe.parse(RUNS[run], rounding=rounding)
    out = mxep.grouped_mm(a_, w, to_torch(group_ends), recipe=recipe)
    out.backward(mx(dout) if isinstance(dout, tuple) else to_torch(dout))
    return to_numpy(out), to_numpy(a_.grad), np.swapaxes(to_numpy(w.grad), 1, 2)


def permute(rows: Array, counts: Array, ranks: int, dout: Array, alignment: int) -> tuple[Array, Array, Array, Array]:
    """Rows (M, K) to padded groups (P, K) and back; each with its gradient for `dout` (P, K), and `rows` as dout."""
    x, y = to_torch(rows).requires_grad_(), to_torch(dout).requires_grad_()
    shape, groups, indices, _, _ = mxep.permute_mxfp8_fwd_hp_bwd(
        x, to_torch(counts), ranks, len(counts) // ranks, group_size_multiple_of=alignment
    )
    groups.backward(to_torch(dout))
    back = mxep.unpermute_hp_fwd_mxfp8_bwd(y, indices, shape)
    back.backward(to_torch(rows))
    return to_numpy(groups), to_numpy(x.grad), to_numpy(back), to_numpy(y.grad)


def moe_module(
    params: dict[str, Array], run: str, top_k: int, score: str, normalize: bool, prob_in: str
) -> torch.nn.Module:
    num_experts, hidden, dim = params["w1"].shape
    options = {"score_func": score, "normalize": normalize, "recipe": RUNS[run], "prob_in": prob_in}
    options |= {"dtype": torch.float32, "device": DEVICE}
    moe = mxep.MoE(dim, hidden, num_experts, top_k, **options)
    moe.load_state_dict({"router.weight": to_torch(params["router"])} | {
        f"experts.{name}": to_torch(params[name]) for name in ("w1", "w2", "w3")
    })  # fmt: skip
    return moe


def moe(
    x: Array, params: dict[str, Array], dy: Array, run: str, **options: Any
) -> tuple[Array, dict[str, Array], dict[str, Array]]:
    """The dense layer: y, its statistics, and the gradients of x and of every parameter."""
    layer, x_ = moe_module(params, run, **options), to_torch(x).requires_grad_()
    y, stats = layer(x_)
    y.backward(to_torch(dy))
    grads = {name.rpartition(".")[2]: p.grad for name, p in layer.named_parameters() if "experts" in name}
    grads |= {"x": x_.grad, "router": layer.router.weight.grad}
    return to_numpy(y), _numpy(stats._asdict()), _numpy(grads)


def _numpy(tensors: dict[str, torch.Tensor]) -> dict[str, Array]:
    return {name: to_numpy(t) for name, t in tensors.items()}
