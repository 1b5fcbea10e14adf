"""Every kernel as a typed op `torch.ops.mxep.<name>`: its schema and its fake rule are its plan.

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

from ..core_kernels.combine import plan as combine_ops
from ..core_kernels.fold import plan as fold
from ..core_kernels.fold import plan_both as both_fold
from ..core_kernels.fold import plan_loss as fold_loss_kernels
from ..core_kernels.formats import BLOCK, Rounding, packed_width
from ..core_kernels.grouped_gemm import plan as grouped_gemm
from ..core_kernels.grouped_gemm import plan_folded as folded_gemm
from ..core_kernels.launch import KernelOp, require_dtype, require_multiple, require_rank, require_shape
from ..core_kernels.permute import plan as permute
from ..core_kernels.quantize import plan as quantize
from ..core_kernels.routing import plan as routing
from ..core_kernels.scale_layout import plan as scale_layout
from ..core_kernels.swiglu import plan as swiglu_kernels
from ._call import call, require_tensor, run
from ._launch import array_type, as_bytes, check_devices
from ._register import register

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
        quantize.quantize_rowwise,
        fold.fold_groups,
        both_fold.quantize_both_fold,
        fold_loss_kernels.count_fold_loss,
        scale_layout.block_scales,
        scale_layout.unblock_scales,
        combine_ops.combine,
        combine_ops.combine_bwd,
        swiglu_kernels.swiglu,
        swiglu_kernels.swiglu_row,
        swiglu_kernels.swiglu_col,
        swiglu_kernels.swiglu_bwd,
        swiglu_kernels.swiglu_bwd_row,
        swiglu_kernels.swiglu_bwd_col,
        swiglu_kernels.swiglu_bwd_both,
        grouped_gemm.grouped_mm_mx,
        grouped_gemm.grouped_mm_bf16,
        grouped_gemm.grouped_wgrad_mx,
        grouped_gemm.grouped_wgrad_bf16,
        grouped_gemm.grouped_wgrad_bf16_t,
        folded_gemm.grouped_mm_fold,
        folded_gemm.grouped_mm_fold_bias,
        folded_gemm.grouped_wgrad_fold,
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
    num_inputs, names = len(op.inputs), tuple(_options(op))

    # The dispatcher passes arguments by position and leaves out trailing ones that equal their defaults.
    def eager(*args: Any) -> Any:
        outputs = run(op, args[:num_inputs], names, args[num_inputs:])
        return outputs[0] if len(outputs) == 1 else outputs

    def fake(*args: Any) -> Any:
        tensors = args[:num_inputs]
        check_devices(op, [t.device for t in tensors])
        # Not `op.plan`: its cache hashes shapes, and symbolic sizes have no hash.
        types = (array_type(t.shape, t.dtype) for t in tensors)
        launch = op.make_plan(*types, arch="cpu", **dict(zip(names, args[num_inputs:], strict=False)))
        device = tensors[0].device
        outputs = tuple(torch.empty(a.shape, dtype=getattr(torch, a.dtype), device=device) for a in launch.out)
        return outputs[0] if len(outputs) == 1 else outputs

    return register(op.name, schema(op), eager, fake)


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
quantize_rowwise = _define(quantize.quantize_rowwise)
fold_groups = _define(fold.fold_groups)
quantize_both_fold = _define(both_fold.quantize_both_fold)
count_fold_loss = _define(fold_loss_kernels.count_fold_loss)
block_scales = _define(scale_layout.block_scales)
unblock_scales = _define(scale_layout.unblock_scales)
combine = _define(combine_ops.combine)
combine_bwd = _define(combine_ops.combine_bwd)
swiglu = _define(swiglu_kernels.swiglu)
swiglu_row = _define(swiglu_kernels.swiglu_row)
swiglu_col = _define(swiglu_kernels.swiglu_col)
swiglu_bwd = _define(swiglu_kernels.swiglu_bwd)
swiglu_bwd_row = _define(swiglu_kernels.swiglu_bwd_row)
swiglu_bwd_col = _define(swiglu_kernels.swiglu_bwd_col)
swiglu_bwd_both = _define(swiglu_kernels.swiglu_bwd_both)
grouped_mm_mx = _define(grouped_gemm.grouped_mm_mx)
grouped_mm_bf16 = _define(grouped_gemm.grouped_mm_bf16)
grouped_wgrad_mx = _define(grouped_gemm.grouped_wgrad_mx)
grouped_wgrad_bf16 = _define(grouped_gemm.grouped_wgrad_bf16)
grouped_wgrad_bf16_t = _define(grouped_gemm.grouped_wgrad_bf16_t)
grouped_mm_fold = _define(folded_gemm.grouped_mm_fold)
grouped_mm_fold_bias = _define(folded_gemm.grouped_mm_fold_bias)
grouped_wgrad_fold = _define(folded_gemm.grouped_wgrad_fold)


def _is_packed(q: Tensor, sf: Tensor) -> bool:
    """Whether q and sf are the two parts of packed rows `[q | sf]` in one buffer."""
    k, width = q.shape[1], packed_width(q.shape[1])
    return (
        q.stride() == sf.stride() == (width, 1)
        and q.untyped_storage().data_ptr() == sf.untyped_storage().data_ptr()
        and sf.storage_offset() == q.storage_offset() + k
    )


def _checked_q_sf(q: Tensor, sf: Tensor, row_map: Tensor) -> tuple[Tensor, Tensor]:
    op = "permute_q_sf"
    for name, tensor in (("q", q), ("sf", sf), ("row_map", row_map)):
        require_tensor(op, name, tensor)
    q, sf = as_bytes(q), as_bytes(sf)
    types = [array_type(t.shape, t.dtype) for t in (q, sf, row_map)]
    for name, array in zip(("q", "sf"), types, strict=False):
        require_dtype(op, name, array, "uint8")
        require_rank(op, name, array, 2)
    require_multiple(op, "q", q.shape[1], BLOCK, "last dim")
    require_shape(op, "sf", types[1], (q.shape[0], q.shape[1] // BLOCK), "one scale per 32 values of q's last dim")
    permute.check_map(op, types[2])
    return q, sf


def _permute_q_sf(q: Tensor, sf: Tensor, row_map: Tensor) -> tuple[Tensor, Tensor]:
    q, sf = _checked_q_sf(q, sf, row_map)
    if _is_packed(q, sf):
        width = packed_width(q.shape[1])
        packed = q.as_strided((q.shape[0], width), (width, 1))
    else:
        packed = torch.cat([q, sf], dim=1)
    q, sf = call(permute.permute_mx, packed, row_map)
    return q, sf


def _fake_permute_q_sf(q: Tensor, sf: Tensor, row_map: Tensor) -> tuple[Tensor, Tensor]:
    q, sf = _checked_q_sf(q, sf, row_map)
    rows = row_map.shape[0]
    return q.new_empty((rows, q.shape[1]), dtype=torch.uint8), sf.new_empty((rows, sf.shape[1]), dtype=torch.uint8)


permute_q_sf = register(
    "permute_q_sf", "(Tensor q, Tensor sf, Tensor row_map) -> (Tensor, Tensor)", _permute_q_sf, _fake_permute_q_sf
)
"""Gather MX rows given as q (M, K) and sf (M, K/32) through row_map (P,) -> q (P, K), sf (P, K/32).

What a packed all-to-all returned is read where it lies; separate q and sf are packed first.
"""
