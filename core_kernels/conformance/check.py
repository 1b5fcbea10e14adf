"""Compares the outputs of a case with its definition: exact bytes, the error bound of a sum, SQNR in dB."""

import re
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from ..cases import Arrays, Case
from ..grouped_gemm.folded import oracle_sm90
from ..registry import OPS
from ..swiglu import oracle as swiglu_oracle
from .backend import Backend
from .compare import DifferentError, bits, gemm_bound, same_bytes, sqnr_db
from .definitions import DEFINITIONS

Array = np.ndarray
FP8_CHAIN = 2.0**-9
"""The largest loss of an FP8 tensor core of sm_90, relative to sum|a||b|. It aligns 32 products and the sum so far to
the largest of them and cuts each below 2^-13 of it. At worst that is 33 * 2^-13 for every 32 terms; measured 2^-11
where a group has 32 terms of widely spread magnitudes, 2^-14 at 7168. `fp8_sums` is the sharper test, of operands that
lose more too."""

FFN_DB = 56.9
"""dB of the worst expert from the quantized definition. Measured on CPUs at least 66.9, less 10. The 66.9 are one bf16
value of an expert with few rows, which rounds the other way: another matmul sums in another order."""

PRODUCTS = {name for name in OPS if name.startswith(("grouped_", "logits_"))}
"""Ops with an error bound; the others write exact bytes."""


class Definition:
    """The inputs of a case, and the outputs of its definition. Whoever compares several backends with it keeps it. With
    optional group ends it defines other rows too."""

    def __init__(self, case: Case) -> None:
        self.case, self.arrays = case, case.arrays()
        op = OPS.get(case.op)
        given = self.arrays[:-1] if op and op.optional_ends and len(self.arrays) == len(op.inputs) else self.arrays
        want = DEFINITIONS[case.op](*given, **case.options_of())
        self.want: Arrays = tuple(want) if isinstance(want, tuple | list) else (want,)

    @cached_property
    def sums(self) -> tuple[Array, Array]:
        """Of a grouped product: its fp64 sums, and the sums of the magnitudes of its terms."""
        op = self.case.op
        named = zip(OPS[op].inputs, self.arrays, strict=True)
        positive = [x if name.endswith(("sf", "ends")) else x & 0x7F if x.dtype == np.uint8 else np.abs(x)
                    for name, x in named]  # fmt: skip
        exact, magnitude = (DEFINITIONS[op](*of, out_dtype="float64") for of in (self.arrays, positive))
        return exact, magnitude


def as_defined(backend: Backend, of: Definition, got: Any) -> None:
    """Assert the bytes of the definition, where the op specifies them. A last output that is a sum in any order is
    within its bound instead."""
    case, arrays, want = of.case, of.arrays, of.want
    got = tuple(got) if isinstance(got, tuple | list) else (got,)
    require_types(got, want)
    got = with_rest(case, arrays, got, want)
    if case.op == "permute_rows":  # which copies the bits of a NaN
        got, want = ([bits(x) for x in side] for side in (got, want))
    bound = next((bound for start, bound in BOUNDS.items() if case.op.startswith(start)), None)
    if bound and want[-1].size:
        *got, total = got
        *want, _ = want
        bound(backend, of, total)
    same_bytes(got, want)


def require_types(got: Sequence[Array], want: Sequence[Array]) -> None:
    """Raise DifferentError unless got has the number, the shapes and the dtypes of want."""
    found, expected = ([(x.dtype.name, x.shape) for x in of] for of in (got, want))
    if found != expected:
        said = [", ".join(f"{dtype}{list(shape)}" for dtype, shape in of) for of in (found, expected)]
        raise DifferentError(f"returns {said[0]}, expected {said[1]}", 0)


def with_rest(case: Case, arrays: Arrays, got: Sequence[Array], want: Arrays) -> list[Array]:
    """got, with the values of `want` where the op leaves them unspecified: past the last end."""
    if case.op not in OPS:
        return list(got)
    op, filled = OPS[case.op], [np.array(w) for w in want]
    for part, found in zip(op.specified(arrays, filled), op.specified(arrays, got), strict=True):
        part[...] = found
    return filled


def fp8_chain(backend: Backend) -> float:
    """`FP8_CHAIN` where FP8 tensor cores sum the backend's folded products."""
    return FP8_CHAIN if backend.offers("FP8_TENSOR_CORES") else 0


def fp8_sums(backend: Backend, op: str, got: Array, *operands: Array) -> None:
    """Where Hopper's tensor cores sum, assert that got = op(*operands) has the bytes of oracle_sm90.py."""
    if backend.offers("SM90_SUMS"):
        same_bytes((got,), (getattr(oracle_sm90, op)(*operands, got.dtype.name),))


def dprob_bound(backend: Backend, of: Definition, got: Array) -> None:
    """The terms are exact; the order of their sum is not defined."""
    numbers = {name: x for name, x in of.case.options_of().items() if name in ("alpha", "limit", "offset")}
    dh, gate, up, *_ = of.arrays
    with np.errstate(invalid="ignore"):
        terms = swiglu_oracle.dprob_terms(dh, gate, up, **numbers).astype(np.float64)
        exact = np.where(np.abs(terms.sum(-1)) > np.finfo(np.float32).max, np.inf * terms.sum(-1), terms.sum(-1))
    gemm_bound(got, exact, np.abs(terms).sum(-1), terms.shape[1])


def dprobs_bound(backend: Backend, of: Definition, got: Array) -> None:
    """Each dot product is within the bound, and zero for an empty slot."""
    dy, rows, slots, *_ = of.arrays
    none, width = slots < 0, rows.shape[1]
    gathered = rows[np.where(none, 0, slots)] if rows.size else np.zeros((*none.shape, width))
    x = np.where(none[..., None], 0, gathered.astype(np.float64))
    dy = np.where(none[..., None], 0, dy.astype(np.float64)[:, None])
    with np.errstate(invalid="ignore"):
        exact, magnitude = (x * dy).sum(-1), np.abs(x * dy).sum(-1)
    gemm_bound(got, exact, magnitude, width)
    same_bytes((got[none],), (np.zeros(none.sum(), np.float32),))


def product_bound(backend: Backend, of: Definition, got: Array) -> None:
    """The bound of a grouped product. It is zero for rows past the last end and for groups without tokens."""
    op, arrays = of.case.op, of.arrays
    named = dict(zip(OPS[op].inputs, arrays, strict=True))
    exact, magnitude = of.sums
    terms = sum(x.shape[1] for name, x in named.items() if re.fullmatch(r"lhs2?(_qf?)?", name))
    # fp32 roundings of a term of a blockwise sum, in halves of 2^-23: two scaled operands, or a product of scales and
    # of a partial sum
    terms += 4 * op.startswith("grouped_mm_blockwise") + ("bias" in named)
    if "wgrad" in op:
        terms = np.diff(arrays[-1], prepend=0)[:, None, None]
    of_fp8 = hasattr(oracle_sm90, op)
    gemm_bound(got, exact, magnitude, terms, fp8_chain(backend) if of_fp8 else 0)
    if of_fp8:
        fp8_sums(backend, op, got, *arrays)


def ffn_bound(backend: Backend, of: Definition, got: Array) -> None:
    """Exact bytes where each sum has one term. Elsewhere `FFN_DB` of each expert; zeros past the last end."""
    (want,), (x, *_, ends, _) = of.want, of.arrays
    if (np.count_nonzero(x[: ends[-1]], axis=-1) <= 1).all():
        same_bytes((got,), (want,))
    same_bytes((got[ends[-1] :],), (want[ends[-1] :],))
    for expert, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        db = sqnr_db(got[start:end], want[start:end])
        assert start == end or db >= FFN_DB, f"expert {expert}: {db:.1f} dB, allowed: at least {FFN_DB}"


Bound = Callable[[Backend, Definition, Array], None]
BOUNDS: dict[str, Bound] = {
    "swiglu_bwd": dprob_bound, "swiglu_ffn": ffn_bound, "combine_bwd": dprobs_bound, "grouped_": product_bound
}  # fmt: skip
"""First letters of ops -> the bound of their last output."""
