"""Triton's interpreter, through the torch frontend's launcher, on poisoned outputs."""

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch
from mxep.core_kernels import grouped_gemm
from mxep.core_kernels.launch import ArrayType, KernelOp
from mxep.torch_frontend import _call

from .arrays import poisoned, to_numpy, to_torch
from .cpp import KERNEL_OPS, POISON


def run(op: KernelOp, *inputs: np.ndarray, poison: int = POISON, **options: Any) -> Any:
    def empty(array: ArrayType, device: torch.device) -> torch.Tensor:
        return poisoned(array.shape, getattr(torch, array.dtype), poison)

    with mock.patch.object(_call, "empty", empty), _call.force_implementation("triton"):
        results = tuple(map(to_numpy, _call.call(op, *map(to_torch, inputs), **options)))
    return results if len(results) > 1 else results[0]


GEMM_OPS = (
    grouped_gemm.grouped_mm_mx,
    grouped_gemm.grouped_mm_bf16,
    grouped_gemm.grouped_wgrad_mx,
    grouped_gemm.grouped_wgrad_bf16,
)
OPS: dict[str, Callable] = {op.name: partial(run, op) for op in (*KERNEL_OPS, *GEMM_OPS)}
