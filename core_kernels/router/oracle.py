"""The definition of the choice of experts and of its gradient in numpy: exact bytes; and of the tokens' gradient.

    logits --scores--> scores (T, E) --+ bias, groups--> the top k --> ids, weights (T, k)
                                '--divided by their sum--> shares --sums over 8 tokens--> share_sums (T/8, E)

Each fp32 operation is a statement of its own and rounds to nearest. `row_sum` has no order: its terms are integers.
"""

import numpy as np

from ..oracle_math import Array, e8m0_value, round_to
from ..swiglu import oracle as swiglu_oracle

F32 = np.float32
ONE, TINY = F32(1), F32(2.0**-126)
UNITS = F32(2.0**40)
CHUNK = 8
"""Tokens of one row of share_sums."""


def row_sum(x: Array) -> Array:
    """x (T, N) fp32 -> (T, 1) fp32, in fixed point.

    The unit is 2^-40 of the largest value's power of two. Terms are cut to whole units, their integer sum is exact, and
    one conversion rounds it. A row with NaN or infinity gives NaN.

    >>> row_sum(np.float32([[1, 2.0**-30, 2.0**-50]]))[0, 0] == 1 + 2.0**-30  # in fp32: 1
    True
    """
    largest = np.abs(x).max(-1, keepdims=True)
    finite = np.isfinite(largest)
    byte = np.where(finite, largest, 0).astype(F32).view(np.uint32) >> 23
    unit = e8m0_value(byte)  # the power of two of the largest value; 2^-127 for subnormals
    whole = np.trunc(np.where(finite, x, 0).astype(np.float64) / unit * UNITS).astype(np.int64)
    total = whole.sum(-1, keepdims=True).astype(F32) / UNITS * unit.astype(F32)
    return np.where(finite, total, F32(np.nan))


def _exp_minus(x: Array) -> Array:
    """e^-x of x >= 0; NaN of NaN."""
    return np.where(np.isnan(x), F32(np.nan), swiglu_oracle.exp_minus(x))


def _at_least_tiny(x: Array) -> Array:
    return np.where(x < TINY, TINY, x)


def _scores(logits: Array, score_func: str) -> Array:
    """(T, E) fp32: the softmax over the experts, or each expert's sigmoid."""
    if score_func == "sigmoid":
        return np.where(np.isnan(logits), F32(np.nan), swiglu_oracle._sigmoid(logits))
    p = _exp_minus(np.fmax.reduce(logits, -1, keepdims=True) - logits)
    return p / row_sum(p)


def _shares(s: Array, score_func: str) -> Array:
    """Scores that sum to one over the experts."""
    return s / _at_least_tiny(row_sum(s)) if score_func == "sigmoid" else s


def _canonical(x: Array) -> Array:
    return np.where(np.isnan(x), F32(np.nan), x)


def _top(values: Array, k: int) -> Array:
    """The indices of the k largest values of a row, largest first; NaN is above all, equals go to the lower index."""
    rank = np.where(np.isnan(values), 1, 0)
    index = np.broadcast_to(np.arange(values.shape[-1]), values.shape)
    return np.lexsort((index, -np.where(rank, 0, values), -rank), axis=-1)[..., :k]


def _kept(choice: Array, num_groups: int, top_k_groups: int, group_score: str) -> Array:
    """(T, E) bool: the experts of the best groups. A group scores its largest value, or the sum of its two largest."""
    tokens, experts = choice.shape
    grouped = choice.reshape(tokens, num_groups, experts // num_groups)
    best = np.take_along_axis(grouped, _top(grouped, 2), -1)
    value = best[..., 0] if group_score == "max" else best[..., 0] + best[..., 1]
    kept = np.zeros((tokens, num_groups), bool)
    np.put_along_axis(kept, _top(value, top_k_groups), True, -1)
    return np.repeat(kept, experts // num_groups, axis=-1)


def _chosen(value: Array, bias: Array, top_k: int, groups: tuple[int, int, str], force_balance: bool) -> Array:
    """The ids (T, top_k) int32 of the chosen experts."""
    tokens, experts = value.shape
    choice = value + bias if len(bias) else value
    if force_balance:
        first = np.arange(tokens)[:, None] * top_k
        choice = -((np.arange(experts) - first) % experts).astype(F32)
    num_groups, top_k_groups, group_score = groups
    if num_groups == 1:
        return _top(choice, top_k).astype(np.int32)
    kept = _kept(choice, num_groups, top_k_groups, group_score)
    most = experts // num_groups * top_k_groups
    inside = np.nonzero(kept)[1].reshape(tokens, most)  # the ids of the kept experts, ascending
    best = _top(np.take_along_axis(choice, inside, -1), top_k)
    return np.take_along_axis(inside, best, -1).astype(np.int32)


def _weights(chosen: Array, score_func: str, normalize: bool, route_scale: float) -> Array:
    """The weights (T, k) from the values of the chosen experts: logits for softmax_of_chosen, or scores."""
    if score_func == "softmax_of_chosen":
        p = _exp_minus(np.fmax.reduce(chosen, -1, keepdims=True) - chosen)
        w = p / row_sum(p)
    else:
        w = chosen / _at_least_tiny(row_sum(chosen)) if normalize else chosen
    return _canonical(w * F32(route_scale))


def _share_sums(shares: Array) -> Array:
    """(T, E) -> (ceil(T/8), E): sums in units of 2^-40; NaN where a share is."""
    rows = [shares[i : i + CHUNK] for i in range(0, len(shares), CHUNK)]
    sums = np.zeros((len(rows), shares.shape[1]), F32)
    for out, part in zip(sums, rows, strict=True):
        bad = np.isnan(part)
        whole = np.where(bad, 0, part * UNITS).astype(np.int64)
        out[:] = np.where(bad.any(0), F32(np.nan), whole.sum(0).astype(F32) / UNITS)
    return sums


@np.errstate(all="ignore")
def route(
    logits: Array, bias: Array, top_k: int, score_func: str = "softmax", normalize: bool = True,
    route_scale: float = 1.0, num_groups: int = 1, top_k_groups: int = 1, group_score: str = "top2",
    force_balance: bool = False,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """logits (T, E) fp32 or bf16, bias (E,) fp32 or (0,) -> ids (T, k) int32, weights (T, k), share_sums, fp32.

    >>> ids, weights, _ = route(np.float32([[0, 2, 1]]), np.zeros(0, np.float32), 2, "sigmoid", normalize=False)
    >>> ids, weights
    (array([[1, 2]], dtype=int32), array([[0.8807971 , 0.73105866]], dtype=float32))
    """
    logits = logits.astype(F32)
    s = _scores(logits, score_func)
    value = logits if score_func == "softmax_of_chosen" else s
    ids = _chosen(value, bias, top_k, (num_groups, top_k_groups, group_score), force_balance)
    weights = _weights(np.take_along_axis(value, ids, -1), score_func, normalize, route_scale)
    return ids, weights, _share_sums(_shares(s, score_func))


@np.errstate(all="ignore")
def route_bwd(
    dweights: Array, dshares: Array, logits: Array, expert_ids: Array,
    score_func: str = "softmax", normalize: bool = True, route_scale: float = 1.0, split: bool = False,
) -> Array:  # fmt: skip
    """-> dlogits (T, E) in the dtype of logits; with `split` two bf16 terms of it, (T, 2 E). dshares: (E,) fp32, the
    gradient of each expert's sum of shares, or (0,)."""
    dtype, logits = logits.dtype, logits.astype(F32)
    s = _scores(logits, score_func)
    d, chosen = np.zeros_like(s), np.zeros(s.shape, bool)
    np.put_along_axis(d, expert_ids, dweights * F32(route_scale), -1)
    np.put_along_axis(chosen, expert_ids, True, -1)
    shared = len(dshares) > 0

    if score_func == "softmax_of_chosen":
        inside = np.where(chosen, logits, F32(-np.inf))
        p = _exp_minus(np.fmax.reduce(inside, -1, keepdims=True) - inside)
        w = p / row_sum(p)
        dlogits = w * (d - row_sum(w * d))
        if shared:
            dlogits = dlogits + s * (dshares - row_sum(s * dshares))
    else:
        if normalize:
            inside = np.where(chosen, s, F32(0))
            total = row_sum(inside)
            w = inside / _at_least_tiny(total)
            d = np.where(chosen & ~(total < TINY), (d - row_sum(w * d)) / _at_least_tiny(total), F32(0))
        if score_func == "softmax":
            g = d + dshares if shared else d
            dlogits = s * (g - row_sum(s * g))
        else:
            if shared:
                total = row_sum(s)
                share = s / _at_least_tiny(total)
                of_shares = (dshares - row_sum(share * dshares)) / _at_least_tiny(total)
                d = d + np.where(total < TINY, F32(0), of_shares)
            dlogits = d * (s * (ONE - s))
    dlogits = _canonical(dlogits).astype(np.float64)
    if not split:
        return round_to(dlogits, dtype.name)
    high = round_to(dlogits, "bfloat16")
    low = np.where(np.isfinite(high.astype(F32)), dlogits - high.astype(np.float64), 0)
    return np.concatenate([high, round_to(low, "bfloat16")], axis=1)


def logits_bwd(dlogits: Array, weight: Array, dx: Array) -> Array:
    """dlogits (T, 2 E), weight (E, D), dx (T, D) or (0,), bf16 -> (T, D): the exact sum, rounded once.

    >>> from ml_dtypes import bfloat16 as bf16
    >>> logits_bwd(np.array([[1, 0.5]], bf16), np.array([[2, 4]], bf16), np.ones((1, 2), bf16))
    array([[4, 7]], dtype=bfloat16)
    """
    both = np.concatenate([weight, weight]).astype(np.float64)
    total = dlogits.astype(np.float64) @ both
    return round_to(total + dx.astype(np.float64) if dx.ndim == 2 else total, "bfloat16")
