"""Where a group's tokens are, inside Triton kernels."""

import triton
import triton.language as tl


@triton.jit
def tokens_of(start, end, M, MULTIPLE: tl.constexpr):
    """Where a group's tokens are by its ends, and whether it is whole: both are multiples of MULTIPLE and in 0..M, and
    it does not end before it begins.

    Nobody looks at ends on the host. Each counts as the multiple below it, within 0..M, so that nobody reads outside;
    and what depends on a group that is not whole is NaN, since a wrong number would show nowhere.
    """
    whole = (start >= 0) & (start <= end) & (end <= M) & (((start | end) % MULTIPLE) == 0)
    # Divided and multiplied, the compiler knows that they are multiples and loads 16 bytes at a time.
    start = tl.minimum(tl.maximum(start, 0), M) // MULTIPLE * MULTIPLE
    end = tl.minimum(tl.maximum(end, 0), M) // MULTIPLE * MULTIPLE
    return start, end, whole
