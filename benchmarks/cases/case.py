"""One measured op: its inputs, the part of its outputs that the CPU recomputes, and the least bytes it moves.

Case.program(call, *inputs)      one op or several, through the `call` of a frontend (calls.py)
Case.part(case, outputs, at)     a slice of the inputs and outputs, small enough for the CPU
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from mxep.core_kernels.cases import Layer, Timed
from mxep.core_kernels.formats import BLOCK, SPAN, spans
from mxep.core_kernels.launch import ArrayType
from mxep.core_kernels.registry import OPS
from mxep.torch_frontend.ops.launch import dtype_name
from torch import Tensor

Tensors = tuple[Tensor, ...]
Call = Callable[..., tuple[Any, ...]]
"""(name of an op, *arrays, **options) -> outputs."""
Part = Callable[["Case", Tensors, slice], tuple[Tensors, Tensors]]


@dataclass(frozen=True)
class Case:
    """One line of the table of ops: a call of the family's `TIMED`, on tensors.

    rows, slice_: the CPU recomputes a few slices of `slice_` rows, of `rows`; 0: all rows of the first input.
    formula: name of the peer in formulas_torch.py and formulas_jax.py; None: no compiled peer.
    read: bytes read; None: every input once.
    by_bytes: whether a device copy of the same bytes is the op's roof.
    magnitude: sum of |terms| of the fp32 sums in the last output, for the error bound; None: all outputs are exact.
    compose: compose(call, *arrays), for several ops.
    separate: separate(call, *arrays), other ops with the same outputs: a peer.
    """

    timed: Timed
    layer: Layer
    inputs: Tensors
    part: Part
    rows: int = 0
    slice_: int = 32
    formula: str | None = None
    read: int | None = None
    by_bytes: bool = True
    magnitude: Callable[..., Tensor] | None = None
    compose: Callable[..., tuple[Any, ...]] | None = None
    separate: Callable[..., tuple[Any, ...]] | None = None

    @property
    def name(self) -> str:
        return self.timed.name

    @property
    def shape(self) -> Mapping[str, int | str]:
        return {**{size: self.layer.sizes[size] for size in self.timed.sizes}, **self.timed.words}

    @property
    def options(self) -> Mapping[str, int]:
        return {name: self.layer.sizes[name] for name in self.timed.options}

    def program(self, call: Call, *arrays: Any) -> tuple[Any, ...]:
        return self.compose(call, *arrays) if self.compose else call(*self.timed.ops, *arrays, **self.options)

    def specified(self, outputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """The parts of the outputs that the op specifies; of several ops all."""
        return outputs if self.compose else OPS[self.timed.ops[0]].specified(self.inputs, outputs)

    def nbytes(self, outputs: Tensors) -> int:
        """The least bytes to read and to write."""
        read = sum(x.nbytes for x in self.inputs) if self.read is None else self.read
        return read + sum(out.nbytes for out in outputs)

    def scratch(self) -> int:
        """Bytes that the CUDA kernel of one op needs besides inputs and outputs, the same on every architecture."""
        if self.compose:
            return 0
        types = [ArrayType(tuple(x.shape), dtype_name(x.dtype)) for x in self.inputs]
        arrays = OPS[self.timed.ops[0]].launch(*types, arch="sm_90", **self.options).scratch
        return sum(math.prod(x.shape) * np.dtype(x.dtype).itemsize for x in arrays)


def values(*shape: int, device: str, octaves: float = 3, operand: int = 0) -> Tensor:
    """Normal bf16 values. Magnitudes vary by `octaves` (one standard deviation) between rows, a third of it between
    columns. Seeded by the sum of the shape and by `operand`, the index of the array in its case."""
    rng = torch.Generator(device).manual_seed(sum(shape) + 1_000_003 * operand)  # a CPU reads 32 bits
    rows = torch.randn(*shape[:-1], 1, generator=rng, device=device)
    columns = torch.randn(shape[-1], generator=rng, device=device)
    x = torch.randn(shape, generator=rng, device=device, dtype=torch.bfloat16)
    return x.mul_(torch.exp2(octaves * rows).bfloat16()).mul_(torch.exp2(octaves / 3 * columns).bfloat16())


def rows_part(case: Case, outputs: Tensors, at: slice) -> tuple[Tensors, Tensors]:
    """The same rows of every input and output; of a transposed output the columns computed from these rows."""
    m = len(case.inputs[0])

    def cut(out: Tensor) -> Tensor:
        return out[at] if len(out) == m else out[:, at.start * out.shape[1] // m : at.stop * out.shape[1] // m]

    return tuple(x[at] for x in case.inputs), tuple(map(cut, outputs))


def equal_groups(layer: Layer, device: str) -> tuple[int, Tensor]:
    """The rows of each local expert's group, and the ends of the groups."""
    length = layer.tokens // layer.local_experts // BLOCK * BLOCK
    return length, length * torch.arange(1, layer.local_experts + 1, dtype=torch.int32, device=device)


def group_part(case: Case, outputs: Tensors, at: slice) -> tuple[Tensors, Tensors]:
    """One of several equal groups, of every output its tokens or the slots of their scales: the scale of a span depends
    on the earlier spans of its group."""
    *rows, group_ends = case.inputs
    length = at.stop - at.start
    slot = at.start // SPAN + at.start // length

    def cut(name: str, out: Tensor) -> Tensor:
        if name.endswith("span_sf"):
            return out[slot : slot + spans(length, 1)]
        return out[:, at] if name.endswith("_t") else out[at]

    names = OPS[case.timed.ops[0]].outputs
    return (*(x[at] for x in rows), group_ends[:1]), tuple(map(cut, names, outputs))


def gathered(x: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The rows of x that the index tensor `rows` selects, and an index tensor of the same shape into them."""
    local = torch.arange(rows.numel(), dtype=torch.int32, device=rows.device).view_as(rows)
    return x[rows.flatten().clamp(min=0).long()], torch.where(rows < 0, -1, local)


def gather_part(case: Case, outputs: Tensors, at: slice) -> tuple[Tensors, Tensors]:
    """A slice of the output rows of a gather, and the input rows that it reads."""
    x, row_map = case.inputs
    return gathered(x, row_map[at]), tuple(out[at] for out in outputs)
