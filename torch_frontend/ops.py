"""Every kernel as a typed custom op `torch.ops.mxep.<name>`: its schema and its fake rule are its plan.

    mxep::quantize_row(Tensor x, int rounding=0, bool satfinite=False) -> (Tensor, Tensor)
                       inputs    options of the plan                       outputs

`rounding` is a `Rounding` as an int and dtypes are names ("bfloat16"): that is what a schema can hold.
Ops take and return raw bytes and have no gradient of their own; autograd.py gives them one.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..core_kernels import fold, grouped_gemm, permute, quantize, routing, scale_layout
from ..core_kernels.formats import Rounding, packed_width
from ..core_kernels.launch import KernelOp
from ._call import array_type, as_bytes, call, check_devices, empty

OPS: dict[str, KernelOp] = {
    op.name: op
    for op in (
        quantize.quantize_row,
        quantize.quantize_row_packed,
        quantize.quantize_col,
        quantize.quantize_both,
        quantize.dequantize,
        permute.permute_rows,
        permute.permute_mx,
        routing.sort_by_expert,
        routing.row_map,
        fold.fold_rows,
        fold.quantize_row_fold,
        fold.permute_mx_fold,
        scale_layout.block_scales,
        scale_layout.unblock_scales,
        grouped_gemm.grouped_mm_mx,
        grouped_gemm.grouped_mm_bf16,
        grouped_gemm.grouped_wgrad_mx,
        grouped_gemm.grouped_wgrad_bf16,
    )
}

_SCHEMA_TYPES = {int: "SymInt", bool: "bool", str: "str", Rounding: "int"}


def _options(op: KernelOp) -> dict[str, inspect.Parameter]:
    """The keyword options of the op's plan, without the architecture."""
    parameters = inspect.signature(op.make_plan).parameters
    return {n: p for n, p in parameters.items() if p.kind is p.KEYWORD_ONLY and n != "arch"}


def schema(op: KernelOp) -> str:
    """The op's typed schema: tensors first, then the options of its plan with their defaults."""
    arguments = [f"Tensor {name}" for name in op.inputs]
    for name, option in _options(op).items():
        argument = f"{_SCHEMA_TYPES[option.annotation]} {name}"
        if option.default is not option.empty:
            default = int(option.default) if option.annotation is Rounding else option.default
            argument += f'="{default}"' if isinstance(default, str) else f"={default}"
        arguments.append(argument)
    outputs = ", ".join("Tensor" for _ in op.outputs)
    return f"({', '.join(arguments)}) -> {outputs if len(op.outputs) == 1 else f'({outputs})'}"


def _define(op: KernelOp) -> Callable[..., Any]:
    names = (*op.inputs, *_options(op))

    def split(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Tensor], dict[str, Any]]:
        # The dispatcher leaves out trailing arguments that equal their defaults.
        given = dict(zip(names, args, strict=False)) | kwargs
        return [given.pop(name) for name in op.inputs], given

    def run(*args: Any, **kwargs: Any) -> Any:
        tensors, options = split(args, kwargs)
        outputs = call(op, *tensors, **options)
        return outputs[0] if len(outputs) == 1 else outputs

    def fake(*args: Any, **kwargs: Any) -> Any:
        tensors, options = split(args, kwargs)
        check_devices(op, tensors)
        # Not `op.plan`: its cache hashes shapes, and symbolic sizes have no hash.
        launch = op.make_plan(*(array_type(as_bytes(t)) for t in tensors), arch="cpu", **options)
        outputs = tuple(empty(array, tensors[0].device) for array in launch.out)
        return outputs[0] if len(outputs) == 1 else outputs

    custom = torch.library.custom_op(f"mxep::{op.name}", run, mutates_args=(), schema=schema(op))
    custom.register_fake(fake)
    return custom


quantize_row = _define(quantize.quantize_row)
quantize_row_packed = _define(quantize.quantize_row_packed)
quantize_col = _define(quantize.quantize_col)
quantize_both = _define(quantize.quantize_both)
dequantize = _define(quantize.dequantize)
permute_rows = _define(permute.permute_rows)
permute_mx = _define(permute.permute_mx)
sort_by_expert = _define(routing.sort_by_expert)
row_map = _define(routing.row_map)
fold_rows = _define(fold.fold_rows)
quantize_row_fold = _define(fold.quantize_row_fold)
permute_mx_fold = _define(fold.permute_mx_fold)
block_scales = _define(scale_layout.block_scales)
unblock_scales = _define(scale_layout.unblock_scales)
grouped_mm_mx = _define(grouped_gemm.grouped_mm_mx)
grouped_mm_bf16 = _define(grouped_gemm.grouped_mm_bf16)
grouped_wgrad_mx = _define(grouped_gemm.grouped_wgrad_mx)
grouped_wgrad_bf16 = _define(grouped_gemm.grouped_wgrad_bf16)


def _is_packed(q: Tensor, sf: Tensor) -> bool:
    """Whether q and sf are the two parts of packed rows `[q | sf]` in one buffer."""
    k, width = q.shape[1], packed_width(q.shape[1])
    return (
        q.stride() == sf.stride() == (width, 1)
        and q.untyped_storage().data_ptr() == sf.untyped_storage().data_ptr()
        and sf.storage_offset() == q.storage_offset() + k
    )


@torch.library.custom_op("mxep::permute_q_sf", mutates_args=())
def permute_q_sf(q: Tensor, sf: Tensor, row_map: Tensor) -> tuple[Tensor, Tensor]:
    """Gather MX rows given as q (M, K) and sf (M, K/32) through row_map (P,) -> q (P, K), sf (P, K/32).

    What a packed all-to-all returned is read where it lies; separate q and sf are packed first.
    """
    q, sf = as_bytes(q), as_bytes(sf)
    if _is_packed(q, sf):
        width = packed_width(q.shape[1])
        packed = q.as_strided((q.shape[0], width), (width, 1))
    else:
        packed = torch.cat([q, sf], dim=1)
    q, sf = call(permute.permute_mx, packed, row_map)
    return q, sf


@permute_q_sf.register_fake
def _(q: Tensor, sf: Tensor, row_map: Tensor) -> tuple[Tensor, Tensor]:
    rows = row_map.shape[0]
    return q.new_empty((rows, q.shape[1]), dtype=torch.uint8), sf.new_empty((rows, sf.shape[1]), dtype=torch.uint8)
