"""One measured op: its inputs, the part of its outputs that the CPU recomputes, and the least bytes it moves.

Case.program(call, *inputs)      one op or several, through the `call` of a frontend (calls.py)
Case.part(inputs, outputs, at)   a slice of the inputs and outputs, small enough for the CPU
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Tensors = tuple[Tensor, ...]
Call = Callable[..., tuple[Any, ...]]
"""(name of an op, *arrays, **options) -> outputs."""
Part = Callable[[Tensors, Tensors, slice], tuple[Tensors, Tensors]]


@dataclass(frozen=True)
class Case:
    """One line of the table of ops.

    rows, slice_: the CPU recomputes a few slices of `slice_` rows; the first dim has `rows` rows.
    formula: name of the peer in formulas_torch.py and formulas_jax.py; None: no compiled peer.
    read: bytes read; None: every input once.
    by_bytes: whether a device copy of the same bytes is the op's roof.
    magnitude: sum of |terms| of the fp32 sums in the last output, for the error bound; None: all outputs are exact.
    scratch: bytes that the CUDA kernel needs besides inputs and outputs.
    """

    name: str
    shape: Mapping[str, int | str]
    inputs: Tensors
    program: Callable[..., tuple[Any, ...]]
    part: Part
    rows: int
    slice_: int = 32
    formula: str | None = None
    read: int | None = None
    by_bytes: bool = True
    magnitude: Callable[..., Tensor] | None = None
    scratch: int = 0

    def nbytes(self, outputs: Tensors) -> int:
        """The least bytes to read and to write."""
        read = sum(x.nbytes for x in self.inputs) if self.read is None else self.read
        return read + sum(out.nbytes for out in outputs)


def one(op: str, **options: int) -> Callable[..., tuple[Any, ...]]:
    """The program of a single op."""
    return lambda call, *arrays: call(op, *arrays, **options)


def values(*shape: int, device: str, octaves: float = 3, operand: int = 0) -> Tensor:
    """Normal bf16 values. Magnitudes vary by `octaves` (one standard deviation) between rows, a third of it between
    columns. Seeded by the sum of the shape and by `operand`, the index of the array in its case."""
    rng = torch.Generator(device).manual_seed(sum(shape) + 1_000_003 * operand)  # a CPU reads 32 bits
    rows = torch.randn(*shape[:-1], 1, generator=rng, device=device)
    columns = torch.randn(shape[-1], generator=rng, device=device)
    x = torch.randn(shape, generator=rng, device=device, dtype=torch.bfloat16)
    return x.mul_(torch.exp2(octaves * rows).bfloat16()).mul_(torch.exp2(octaves / 3 * columns).bfloat16())


def rows_part(inputs: Tensors, outputs: Tensors, at: slice) -> tuple[Tensors, Tensors]:
    """The same rows of every input and output; of a transposed output the columns computed from these rows."""
    m = len(inputs[0])

    def cut(out: Tensor) -> Tensor:
        return out[at] if len(out) == m else out[:, at.start * out.shape[1] // m : at.stop * out.shape[1] // m]

    return tuple(x[at] for x in inputs), tuple(map(cut, outputs))


def gathered(x: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The rows of x that the index tensor `rows` selects, and an index tensor of the same shape into them."""
    local = torch.arange(rows.numel(), dtype=torch.int32, device=rows.device).view_as(rows)
    return x[rows.flatten().clamp(min=0).long()], torch.where(rows < 0, -1, local)


def gather_part(inputs: Tensors, outputs: Tensors, at: slice) -> tuple[Tensors, Tensors]:
    """A slice of the output rows of a gather, and the input rows that it reads."""
    x, row_map = inputs
    return gathered(x, row_map[at]), tuple(out[at] for out in outputs)


def whole(inputs: Tensors, outputs: Tensors, at: slice) -> tuple[Tensors, Tensors]:
    """Everything."""
    return inputs, outputs
