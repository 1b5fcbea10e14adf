"""Arguments and calls of test_fuzz.py: arrays that are made without torch, and functions of ours with arguments as they
are drawn."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from mxep import torch_frontend as mt
from mxep.torch_frontend import MXTensor
from mxep.torch_frontend.exchange.route import Route
from mxep.torch_frontend.integrations.layouts import pack_expert_weights, unpack_expert_weights
from torch import Tensor

from ...bad_values import Array


def array(x: Tensor) -> Any:
    values = x.double() if x.is_floating_point() else x.long()
    return Array(values.numpy(), str(x.dtype).removeprefix("torch."))


def floats(*shape: int, dtype: str = "bfloat16") -> Any:
    return Array(np.random.default_rng(0).standard_normal(shape), dtype)


def ints(*values: int, dtype: str = "int32") -> Any:
    return Array(np.array(values, np.int64), dtype)


def tensor(value: Any) -> Any:
    """The value as torch's; what it holds of arrays too."""
    if not isinstance(value, Array):
        return value
    x = torch.from_numpy(np.array(value.values))
    x = x.nan_to_num(0, 0, 0) if value.values.dtype.kind == "f" and not value.dtype.startswith(("f", "b", "c")) else x
    return x.to(getattr(torch, value.dtype))


def product(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function of weights as they are stored, (G, N, K)."""

    def call(B_t: Any, **rest: Any) -> Tensor:
        stored = isinstance(B_t, Tensor) and not isinstance(B_t, MXTensor) and B_t.layout == torch.strided
        return function(B_t=B_t.mT if stored and B_t.dim() >= 2 else B_t, **rest)

    return call


def of_elements(qdata: Any, **rest: Any) -> MXTensor:
    is_bytes = isinstance(qdata, Tensor) and qdata.dtype == torch.uint8 and qdata.layout == torch.strided
    elements = qdata.view(torch.float8_e4m3fn) if is_bytes and not qdata.is_nested else qdata
    return MXTensor.from_qdata_and_scales(elements, **rest)


def route(recipe: str) -> Route:
    """Of 2 tokens with 2 replicas each, over 3 experts, on this process alone."""
    order, inverse, counts = mt.sort_by_expert(torch.tensor([[1, 0], [1, 2]]), 3)
    return mt.dispatch(mt.TokenReplicas(torch.ones(2, 32), order, inverse, 2), counts, recipe=recipe, group="")[2]


def sent(rows: Any, counts: Any, recipe: Any, group: Any) -> Tensor:
    return mt.dispatch(rows, counts, recipe=recipe, group=group)[0]


def sent_replicas(rows: Any, order: Any, inverse: Any, top_k: Any) -> Tensor:
    counts = torch.tensor([1, 2, 1])
    return mt.dispatch(mt.TokenReplicas(rows, order, inverse, top_k), counts, group="")[0]


def activated(**numbers: Any) -> Tensor:
    one = torch.ones(2, 3, dtype=torch.bfloat16)
    return mt.swiglu(one, one, activation=mt.SwiGLU(**numbers))


def unpacked(**given: Any) -> tuple[Tensor, ...]:
    return tuple(unpack_expert_weights(**given).values())


def packed(interleaved: Any, transposed: Any, **parts: Any) -> tuple[Tensor, ...]:
    return tuple(pack_expert_weights(parts, interleaved=interleaved, transposed=transposed).values())


def with_biases(b1: Any, b3: Any, b2: Any) -> Tensor:
    x, w = torch.ones(64, 32), torch.ones(2, 96, 32)
    ends = torch.tensor([32, 64])
    return mt.grouped_swiglu_ffn(x, w, w, w.mT.contiguous(), ends, biases=(b1, b3, b2))
