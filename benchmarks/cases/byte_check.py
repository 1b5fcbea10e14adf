"""Whether the outputs of a case are right: on a few slices, C++ on the CPU recomputes every byte."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .calls import torch_call
from .case import Case, Tensors
from .error_check import EPS

CHUNK = 1 << 28


def _bits(x: Tensor) -> Tensor:
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.itemsize])


def differing(a: Tensor, b: Tensor) -> int:
    """Number of values whose bits differ. Compared in chunks: a comparison of the whole needs as much memory again."""
    pairs = zip(_bits(a).flatten().split(CHUNK), _bits(b).flatten().split(CHUNK), strict=True)
    return sum(int((x != y).sum()) for x, y in pairs)


def count_differing(case: Case, got: Sequence[Tensor], want: Sequence[Tensor]) -> int:
    """Number of values whose bits differ, of the values that the op specifies."""
    return sum(differing(a, b) for a, b in zip(case.specified(got), case.specified(want), strict=True))


def require_same(case: Case, reference: str, got: Sequence[Tensor], want: Sequence[Tensor]) -> None:
    """Raise AssertionError unless all outputs have the shapes, dtypes and bits of the reference."""
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        where = f"{case.name} {dict(case.shape)}: output {i}"
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            raise AssertionError(f"{where} is {a.dtype} {tuple(a.shape)}, {reference} is {b.dtype} {tuple(b.shape)}")
        if n := differing(a, b):
            raise AssertionError(f"{where}: {n} values differ from {reference}")


def slices(case: Case, outputs: Tensors) -> list[slice]:
    """The rows that the CPU recomputes: the first, the middle and the last, and both sides of element 2^31."""
    n, rows = case.slice_, case.rows or len(case.inputs[0])
    starts = {0, rows // 2 // n * n, max(rows - n, 0)}
    for x in (*case.inputs, *outputs):
        if len(x) == rows and x.numel() > 2**31:
            boundary = 2**31 // (x.numel() // len(x)) // n * n
            starts |= {boundary - n, boundary}
    return [slice(start, start + n) for start in sorted(starts)]


def check(case: Case, outputs: Tensors) -> None:
    """Raise AssertionError unless the slices have the bytes that C++ on the CPU computes, sums within their bound."""
    for at in slices(case, outputs):
        small, got = case.part(case, outputs, at)
        small, got = (tuple(x.cpu().contiguous() for x in tensors) for tensors in (small, got))
        want = case.program(torch_call, *small)
        exact = len(want) - (case.magnitude is not None)
        require_same(case, f"the CPU's at {at.start}", got[:exact], want[:exact])
        if case.magnitude is not None:
            bound = 2 * EPS * small[0].shape[-1] * case.magnitude(*small)
            if not bool(((got[-1].double() - want[-1].double()).abs() <= bound).all()):
                raise AssertionError(f"{case.name} {dict(case.shape)}: the last output is past the bound of its sums")
