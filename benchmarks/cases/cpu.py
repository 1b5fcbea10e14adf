"""Cases on the CPU: quantize, dequantize, permute and routing, through the C++ op table."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from mxep.core_kernels import oracle_math
from mxep.core_kernels.launch import ArrayType, KernelOp
from mxep.core_kernels.permute import oracle as permute_oracle
from mxep.core_kernels.permute import plan as permute
from mxep.core_kernels.quantize import oracle as quantize_oracle
from mxep.core_kernels.quantize import plan as quantize
from mxep.core_kernels.routing import oracle as routing_oracle
from mxep.core_kernels.routing import plan as routing
from mxep.torch_frontend import ops
from torch import Tensor

from ..peers import formulas_torch as formulas
from .shapes import Matrix, Received

Tensors = tuple[Tensor, ...]
NAMES = ("quantize_row", "quantize_col", "quantize_both", "dequantize", "permute_mx", "unpermute", "routing")
SLICE = 64  # rows or columns that the oracle, which is slow, computes


@dataclass(frozen=True)
class Case:
    """One op on one input. expected: the first rows of every output, from the oracle. by_bytes: whether a device copy
    is the op's roof."""

    name: str
    op: KernelOp
    inputs: Tensors
    options: Mapping[str, Any]
    shape: Mapping[str, int | str]
    formula: Callable[..., None]
    expected: Callable[[], Sequence[np.ndarray]]
    by_bytes: bool = True


def data(m: int, k: int) -> Tensor:
    """Normal values whose rows and columns differ in magnitude, bf16."""
    rng = torch.Generator().manual_seed(m + k)
    scale = torch.exp2(3 * torch.randn(m, 1, generator=rng) + torch.randn(1, k, generator=rng))
    return (torch.randn(m, k, generator=rng) * scale).bfloat16()


def to_numpy(x: Tensor) -> np.ndarray:
    return x.view(torch.uint16).numpy().view(oracle_math.DTYPES["bfloat16"]) if x.dtype == torch.bfloat16 else x.numpy()


def outputs_of(op: KernelOp, inputs: Tensors, options: Mapping[str, Any]) -> tuple[Tensors, tuple[int, ...]]:
    types = [ArrayType(tuple(x.shape), str(x.dtype).removeprefix("torch.")) for x in inputs]
    signature = op.signature(*types, **options)
    outputs = tuple(torch.empty(a.shape, dtype=getattr(torch, a.dtype)) for a in signature.out)
    return outputs, tuple(signature.attrs.values())


def matrix_cases(shape: Matrix) -> Iterator[Case]:
    x = data(*shape)
    head, left = to_numpy(x[:SLICE]), to_numpy(x[:, :SLICE].contiguous())
    q, sf = ops.quantize_row(x)
    case = {**shape._asdict(), "rounding": "rceil"}
    yield Case("quantize_row", quantize.quantize_row, (x,), {}, case, formulas.quantize_row,
               lambda: quantize_oracle.quantize_row(head))  # fmt: skip
    yield Case("quantize_col", quantize.quantize_col, (x,), {}, case, formulas.quantize_col,
               lambda: quantize_oracle.quantize_col(left))  # fmt: skip
    yield Case("quantize_both", quantize.quantize_both, (x,), {}, case, formulas.quantize_both,
               lambda: (*quantize_oracle.quantize_row(head), *quantize_oracle.quantize_col(left)))  # fmt: skip
    yield Case("dequantize", quantize.dequantize, (q, sf), {}, case, formulas.dequantize,
               lambda: (quantize_oracle.dequantize(q[:SLICE].numpy(), sf[:SLICE].numpy()),))  # fmt: skip


def received_cases(shape: Received) -> Iterator[Case]:
    rng = np.random.default_rng(shape.M)
    pairs = shape.ranks * shape.G
    counts = torch.from_numpy(rng.multinomial(shape.M, rng.dirichlet(np.full(pairs, 4.0))).astype(np.int32))
    row_map, inverse, *_ = ops.row_map(counts, num_rows=shape.M, num_local_experts=shape.G)
    packed = ops.quantize_row_packed(data(shape.M, shape.K))
    padded = data(len(row_map), shape.K)
    ids = torch.from_numpy(rng.integers(0, pairs, shape.M, np.int32))
    case = {**shape._asdict(), "routing": "skewed"}
    yield Case("permute_mx", permute.permute_mx, (packed, row_map), {}, case, formulas.permute_mx,
               lambda: permute_oracle.permute_mx(packed.numpy(), row_map[:SLICE].numpy()))  # fmt: skip
    yield Case("unpermute", permute.permute_rows, (padded, inverse), {}, case, formulas.permute_rows,
               lambda: (permute_oracle.permute_rows(to_numpy(padded), inverse[:SLICE].numpy()),))  # fmt: skip
    yield Case("routing", routing.sort_by_expert, (ids,), {"num_experts": pairs}, case, formulas.sort_by_expert,
               lambda: routing_oracle.sort_by_expert(ids.numpy(), pairs), by_bytes=False)  # fmt: skip


def check(case: Case, got: Tensors, formula: Tensors) -> None:
    """Raise AssertionError unless both sides have the same bytes, and the oracle's on its slice."""
    for name, a, b, slice_ in zip(case.op.outputs, got, formula, case.expected(), strict=True):
        if not torch.equal(a, b):
            raise AssertionError(f"{case.name}: {name}: the two sides differ in {int((a != b).sum())} values")
        np.testing.assert_array_equal(to_numpy(a[: len(slice_)]), slice_, err_msg=f"{case.name}: {name}: the oracle")


def moved(case: Case, outputs: Tensors) -> int:
    """The least bytes to read and to write. A gather reads each row once and no padding."""
    read = sum(x.nbytes for x in case.inputs)
    if case.op.inputs[-1] == "row_map":
        x, row_map = case.inputs
        read = row_map.nbytes + int((row_map >= 0).sum()) * x[0].nbytes
    return read + sum(out.nbytes for out in outputs)
