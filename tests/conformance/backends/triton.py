"""Triton's interpreter, through the torch frontend's launcher, on poisoned outputs."""

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch
from mxep.core_kernels.grouped_gemm import plan as grouped_gemm
from mxep.core_kernels.grouped_gemm import plan_folded as folded_gemm
from mxep.core_kernels.launch import KernelOp
from mxep.torch_frontend import _call, force_implementation
from mxep.torch_frontend._launch import Outputs

from .arrays import poisoned, to_numpy, to_torch
from .cpp import KERNEL_OPS, POISON


def run(op: KernelOp, *inputs: np.ndarray, poison: int = POISON, **options: Any) -> Any:
    def allocate(outputs: Outputs, index: None) -> tuple[torch.Tensor, ...]:
        return tuple(poisoned(s, d, poison) for s, d in zip(outputs.shapes, outputs.dtypes, strict=True))

    quiet = np.errstate(all="ignore")  # the interpreter is numpy, and overflow is among the cases
    with mock.patch.object(_call, "allocate", allocate), force_implementation("triton"), quiet:
        results = tuple(map(to_numpy, _call.call(op, *map(to_torch, inputs), **options)))
    return results if len(results) > 1 else results[0]


GEMM_OPS = (
    grouped_gemm.grouped_mm_mx,
    grouped_gemm.grouped_mm_bf16,
    grouped_gemm.grouped_wgrad_mx,
    grouped_gemm.grouped_wgrad_bf16,
    grouped_gemm.grouped_wgrad_bf16_t,
    folded_gemm.grouped_mm_fold,
    folded_gemm.grouped_mm_fold_bias,
    folded_gemm.grouped_wgrad_fold,
)
OPS: dict[str, Callable] = {op.name: partial(run, op) for op in (*KERNEL_OPS, *GEMM_OPS)}
