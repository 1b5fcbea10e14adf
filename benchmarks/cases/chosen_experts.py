"""Which experts the tokens of a rank choose, and the rows that each expert gets from it.

balanced     every expert gets equally many rows
one_expert   expert 0 gets 30% of the rows. A token chooses it once at most, so of a layer with top_k experts per token
             it gets at most 1 / top_k of them; the other experts share the rest equally
dirichlet    the experts' popularity is one draw of Dirichlet(1, ..., 1), the same on all ranks (SEED); a token draws
             its experts by it, without replacement
"""

from math import lcm

import numpy as np
from mxep.core_kernels.formats import BLOCK

ROUTINGS = ("balanced", "one_expert", "dirichlet")
SHARE, CONCENTRATION, SEED = 0.3, 1.0, 0
Places = np.ndarray
"""(T, E) int64: the place of each expert in a token's order; 0 is its first choice."""


def _popularity(experts: int) -> np.ndarray:
    return np.random.default_rng(SEED).dirichlet(np.full(experts, CONCENTRATION))


def _balanced(tokens: int, experts: int, top_k: int, rng: np.random.Generator) -> Places:
    """Random orders of the experts are dealt to the tokens, top_k to each, and every expert is in each order once."""
    period = lcm(experts, top_k) // top_k  # tokens that use up whole orders
    token = np.arange(tokens)
    place = np.argsort(rng.random((-(-tokens // period), experts)), axis=1)[token // period]
    return (place - (token % period * top_k)[:, None]) % experts


def places(routing: str, tokens: int, experts: int, top_k: int, rank: int) -> Places:
    """The choices of a rank's tokens.

    >>> (places("balanced", 4, 4, 2, rank=0) < 2).sum(0).tolist()
    [2, 2, 2, 2]
    >>> (places("one_expert", 10, 4, 1, rank=0) < 1).sum(0).tolist()
    [3, 3, 2, 2]
    """
    rng = np.random.default_rng([SEED, rank])
    if routing == "balanced":
        return _balanced(tokens, experts, top_k, rng)
    if routing == "one_expert":
        with_it = np.arange(tokens) < round(tokens * min(SHARE * top_k, 1))
        rng.shuffle(with_it)
        others = np.empty((tokens, experts - 1), np.int64)
        for chosen, left in ((True, top_k - 1), (False, top_k)):
            at = with_it == chosen
            others[at] = _balanced(int(at.sum()), experts - 1, max(left, 1), rng) + chosen
        return np.concatenate([np.where(with_it, 0, experts - 1)[:, None], others], axis=1)
    scores = np.log(_popularity(experts)) + rng.gumbel(size=(tokens, experts))
    return np.argsort(np.argsort(-scores, axis=1), axis=1)


def logits(routing: str, tokens: int, experts: int, top_k: int, rank: int) -> np.ndarray:
    """(T, E) fp32: logits with which a router chooses so, (E / 2 - place) / 8, exact in bf16.

    A router in bf16 and one in fp32 choose the same experts.

    >>> logits("balanced", 4, 4, 2, rank=0).max(1).tolist()
    [0.25, 0.25, 0.25, 0.25]
    """
    return ((experts / 2 - places(routing, tokens, experts, top_k, rank)) / 8).astype(np.float32)


def counts(routing: str, rows: int, experts: int, rank: int) -> list[int]:
    """The rows of a rank for each expert, in multiples of 32, so that no group is padded.

    >>> counts("one_expert", 640, 4, rank=0)
    [192, 160, 160, 128]
    """
    blocks = rows // BLOCK
    if routing == "dirichlet":
        found = np.random.default_rng([SEED, rank]).multinomial(blocks, _popularity(experts)).tolist()
    else:
        first = round(blocks * SHARE) if routing == "one_expert" else -(-blocks // experts)
        each, more = divmod(blocks - first, experts - 1) if experts > 1 else (0, 0)
        found = [first, *(each + (e < more) for e in range(experts - 1))]
    return [BLOCK * n for n in found]
