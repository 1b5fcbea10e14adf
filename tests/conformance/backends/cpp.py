"""The C++ table, called straight: plan, poisoned outputs, run."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from mxep import cpp_bindings
from mxep.core_kernels.combine import plan as combine
from mxep.core_kernels.fold import plan as fold
from mxep.core_kernels.fold import plan_both as both_fold
from mxep.core_kernels.fold import plan_loss as fold_loss
from mxep.core_kernels.launch import ArrayType, KernelOp
from mxep.core_kernels.permute import plan as permute
from mxep.core_kernels.quantize import plan as quantize
from mxep.core_kernels.routing import plan as routing
from mxep.core_kernels.scale_layout import plan as scale_layout
from mxep.core_kernels.swiglu import plan as swiglu

from .arrays import poisoned, to_numpy, to_torch

POISON = 0xA5


def run(op: KernelOp, *inputs: np.ndarray, poison: int = POISON, **options: Any) -> Any:
    signature = op.signature(*(ArrayType(x.shape, x.dtype.name) for x in inputs), **options)
    outputs = [poisoned(out.shape, getattr(torch, out.dtype), poison) for out in signature.out]
    cpp_bindings.run(op.name, [to_torch(x) for x in inputs], outputs, list(signature.attrs.values()))
    results = tuple(map(to_numpy, outputs))
    return results if len(results) > 1 else results[0]


KERNEL_OPS = (
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
    fold_loss.count_fold_loss,
    scale_layout.block_scales,
    scale_layout.unblock_scales,
    combine.combine,
    combine.combine_bwd,
    swiglu.swiglu,
    swiglu.swiglu_row,
    swiglu.swiglu_col,
    swiglu.swiglu_bwd,
    swiglu.swiglu_bwd_row,
    swiglu.swiglu_bwd_col,
    swiglu.swiglu_bwd_both,
)
OPS: dict[str, Callable] = {op.name: partial(run, op) for op in KERNEL_OPS}
