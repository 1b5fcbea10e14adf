"""The cases of core_kernels on the device, with any number of rows and any seed.

CASES[name].inputs(seed, m) -> tensors on DEVICE     .torch(*tensors) | .jax(*tensors) -> outputs
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import ml_dtypes
import numpy as np
import torch
from mxep.core_kernels import cases as shared
from mxep.core_kernels.fold.both import plan as plan_both
from mxep.core_kernels.fold.gathered import plan_requantize
from mxep.core_kernels.fold.matrix import plan as plan_matrix
from mxep.core_kernels.formats import spans
from mxep.core_kernels.swiglu.folded import plan_bwd as plan_bwd_fold
from mxep.jax_frontend import ops as jax_ops
from mxep.jax_frontend.ops import call as jax_launch
from mxep.torch_frontend import ops as torch_ops
from torch import Tensor

from .. import cases
from ..conformance.backends.arrays import to_torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Tensors = tuple[Tensor, ...]


@dataclass(frozen=True)
class Case(shared.Case):
    """A case as tensors on DEVICE, and its op in both frontends."""

    @property
    def edges(self) -> tuple[int, ...]:
        return (0, 1, 33) if self.multiple == 1 else (0, 32)

    def scratch(self, inputs: Tensors) -> int:
        """Bytes of scratch memory that the CUDA kernel needs."""
        if self.op == "permute_mx_col_fold":
            packed, row_map, ends = inputs
            return plan_requantize.scratch_bytes(len(row_map), packed.shape[1] // 33 * 32, ends.shape[0])
        if self.op == "swiglu_bwd_fold":
            return 4 * plan_bwd_fold.scratch_words(*inputs[0].shape)
        if self.op == "quantize_blockwise_fold":
            return 2 * spans(inputs[0].shape[0], inputs[1].shape[0]) * inputs[0].shape[1]
        x, ends = inputs[0], inputs[-1]
        if self.op in ("quantize_matrix_fold", "quantize_matrix_fold_t"):
            lines = x.shape[-1] + (0 if self.op.endswith("_t") else x.shape[-2])
            return 4 * plan_matrix.scratch_words(x.shape[:-2].numel(), lines)
        if self.op not in ("quantize_both_fold", "requantize_col_fold"):
            return 0
        if self.op == "requantize_col_fold":
            return plan_requantize.scratch_bytes(*x.shape, ends.shape[0])
        return plan_both.scratch_bytes(*x.shape, ends.shape[0], str(x.dtype).removeprefix("torch."))

    def specified(self, inputs: Tensors, outputs: Any) -> list[Any]:
        """The parts of the outputs that the op specifies."""
        return torch_ops.OPS[self.op].specified(inputs, outputs)

    def inputs(self, seed: int = 0, m: int = 96) -> Tensors:
        return tuple(to_torch(x).to(DEVICE) for x in self.arrays(seed, m))

    def torch(self, *inputs: Tensor, m: int = 96) -> Tensors:
        outputs = getattr(torch_ops, self.op)(*inputs, **self.options_of(m))
        return outputs if isinstance(outputs, tuple) else (outputs,)

    def jax(self, *inputs: Tensor, m: int = 96) -> list[jax.Array]:
        return self.jitted(m)(*map(to_numpy, inputs))

    def jitted(self, m: int = 96) -> Any:
        return _jitted(self.op, tuple(self.options_of(m).items()))


@cache
def _jitted(op: str, options: tuple[tuple[str, Any], ...]) -> Any:
    return jax.jit(lambda *arrays: jax_launch.call(jax_ops.OPS[op], *arrays, **dict(options)))


def to_numpy(x: Tensor) -> np.ndarray:
    return x.cpu().view(torch.int16).numpy().view(ml_dtypes.bfloat16) if x.dtype == torch.bfloat16 else x.cpu().numpy()


def as_bytes(x: Tensor | jax.Array) -> np.ndarray:
    return np.ascontiguousarray(to_numpy(x) if isinstance(x, Tensor) else np.asarray(x)).reshape(-1).view(np.uint8)


def same_bytes(got: Any, want: Any) -> None:
    """Assert that all outputs have the same shapes and bytes."""
    assert [tuple(x.shape) for x in got] == [tuple(x.shape) for x in want]
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        np.testing.assert_array_equal(as_bytes(g), as_bytes(w), err_msg=f"output {i}")


def floats(rng: np.random.Generator, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.from_numpy(shared.floats(rng, *shape, dtype=shared.F32)).to(dtype)


CASES = {name: Case(case.op, case.make, case.options, case.multiple) for name, case in cases.CASES.items()}
EDGES = [(name, m) for name, case in CASES.items() for m in case.edges]
