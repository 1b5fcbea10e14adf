"""One function has one name, one signature and one default in both frontends; the framework forces the exceptions."""

import inspect
from types import FunctionType
from typing import Any

from mxep import jax_frontend, torch_frontend
from mxep.jax_frontend.ops.cpu_gemm import GEMMS
from mxep.torch_frontend.ops.cpu_gemm import TABLE

from ..cases import PRODUCTS
from ..public_names import importable

IN_TORCH, IN_JAX = importable(torch_frontend), importable(jax_frontend)
SHARED = {name for name in IN_TORCH.keys() & IN_JAX.keys() if isinstance(IN_TORCH[name], FunctionType)}

EXCHANGE = "lists of splits and a process group in torch, an Exchange in JAX"
FORCED = {
    "a2a_combine_hp_fwd_mxfp8_bwd": EXCHANGE,
    "a2a_dispatch": EXCHANGE,
    "a2a_dispatch_mxfp8_fwd_hp_bwd": EXCHANGE,
    "to_mxfp8_a2a_dequant": EXCHANGE,
    "permute_mxfp8_fwd_hp_bwd": "torchao's tuple in torch, a RowMap in JAX",
    "unpermute_hp_fwd_mxfp8_bwd": "torchao's tuple in torch, a RowMap in JAX",
    "numerics_report": "a module in torch, parameters and a config in JAX",
    "capabilities": "a device in torch, a platform in JAX",
}
"""Functions whose arguments differ, and why."""

JAX_ONLY = {
    "mx_grad": "MXGradArray: in torch a gradient may be an MXTensor without being announced",
    "rounding": "of an MXGradArray's gradient in weighted_combine",
    "axis_name": "the ranks of a mesh axis; torch has a process group",
    "capacity_factor": "static sizes",
    "on_overflow": "of rows beyond a capacity",
    "transport": "XLA or kernels carry the rows; in torch an option of a layer, whose transport holds buffers",
    "across": "maps that lead along mesh axes; torch's PeerMemory has them inside",
}
TORCH_ONLY = {"group": "the ranks of a process group; JAX has a mesh axis"}


def parameters(function: Any, without: dict[str, str]) -> dict[str, tuple[Any, Any]]:
    found = inspect.signature(function).parameters
    return {name: (p.kind, p.default) for name, p in found.items() if name not in without}


def test_the_signatures_are_the_same() -> None:
    assert set(FORCED) <= SHARED
    for name in SHARED - set(FORCED):
        one = parameters(IN_TORCH[name], TORCH_ONLY)
        other = parameters(IN_JAX[name], JAX_ONLY)
        assert list(one.items()) == list(other.items()), name


def test_the_frameworks_multiply_the_same_ops_on_a_cpu() -> None:
    assert TABLE.keys() == GEMMS.keys() == PRODUCTS


def test_the_default_recipe_is_mxfp8() -> None:
    for frontend in (IN_TORCH, IN_JAX):
        for name, value in frontend.items():
            if not callable(value) or (inspect.isclass(value) and issubclass(value, tuple)):
                continue
            try:
                default = inspect.signature(value).parameters["recipe"].default
            except (KeyError, ValueError):
                continue
            assert default in ("mxfp8", None, inspect.Parameter.empty), (name, default)


def test_the_records_have_the_same_fields() -> None:
    for name in ("RowMap", "ExpertOrder", "MoEStats"):
        assert IN_TORCH[name]._fields == IN_JAX[name]._fields
    # Arrays of JAX have room for all rows that a rank may get; torch's have the rows that it gets.
    fields = *torch_frontend.TokenReplicas._fields, "distinct"
    assert fields == tuple(inspect.signature(jax_frontend.TokenReplicas).parameters)
