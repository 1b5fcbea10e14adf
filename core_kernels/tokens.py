"""The tokens of a group, from its ends, inside Triton kernels."""

import triton
import triton.language as tl


@triton.jit
def rows_with_ends(group_ends, M, G: tl.constexpr):
    """The rows up to the last of G ends, at most M; M where there are no ends."""
    rows = M
    if G > 0:
        rows = tl.minimum(tl.maximum(tl.load(group_ends + G - 1), 0), M)
    return rows


@triton.jit
def tokens_of(start, end, M, MULTIPLE: tl.constexpr):
    """First and last token of a group, and whether the group is whole: its ends are multiples of MULTIPLE in 0..M, in
    order.

    The host does not read ends. An end counts as the multiple below it, clamped to 0..M, so that every read is inside
    the operand. Results that depend on a group that is not whole are NaN: a wrong number would stay unnoticed.
    """
    whole = (start >= 0) & (start <= end) & (end <= M) & (((start | end) % MULTIPLE) == 0)
    # The division and multiplication tell the compiler the alignment, and it loads 16 bytes at a time.
    start = tl.minimum(tl.maximum(start, 0), M) // MULTIPLE * MULTIPLE
    end = tl.minimum(tl.maximum(end, 0), M) // MULTIPLE * MULTIPLE
    return start, end, whole
