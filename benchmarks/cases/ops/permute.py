"""Cases of the family `permute`: received rows to padded groups per expert, also folded, and back."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..case import Call, Case, gather_part, one, values
from ..shapes import Layer

OPS = ("permute_mx", "permute_mx_fold", "unpermute")


class ReceivedRows(NamedTuple):
    """Packed rows after an all-to-all, sorted by sender, with the row map of a skewed routing. read: bytes that the
    permutation reads at least."""

    packed: Tensor
    row_map: Tensor
    inverse: Tensor
    read: int
    shape: Mapping[str, int | str]


def received(layer: Layer, call: Call, x: Tensor) -> ReceivedRows:
    m, g = layer.tokens, layer.local_experts
    rng = np.random.default_rng(m)
    pairs = layer.ranks * g
    counts = torch.from_numpy(rng.multinomial(m, rng.dirichlet(np.full(pairs, 4.0))).astype(np.int32)).to(x.device)
    row_map, inverse, *_ = call("row_map", counts, num_rows=m, num_local_experts=g)
    (packed,) = call("quantize_row_packed", x)
    shape = {"M": m, "K": layer.dim, "G": g, "ranks": layer.ranks, "routing": "skewed"}
    return ReceivedRows(packed, row_map, inverse, m * packed.shape[1] + row_map.nbytes, shape)


def cases(layer: Layer, call: Call, device: str) -> Iterator[Case]:
    x = values(layer.tokens, layer.dim, device=device)
    r = received(layer, call, x)
    yield Case("permute_mx", r.shape, (r.packed, r.row_map), one("permute_mx"), gather_part, len(r.row_map),
               read=r.read, formula="permute_mx")  # fmt: skip
    yield Case("permute_mx_fold", r.shape, (r.packed, r.row_map), one("permute_mx_fold"), gather_part, len(r.row_map),
               read=r.read)  # fmt: skip
    row_map, inverse, shape = r.row_map, r.inverse, r.shape
    del r  # the packed rows are not needed any more
    (padded,) = call("permute_rows", x, row_map)
    yield Case("unpermute", shape, (padded, inverse), one("permute_rows"), gather_part, layer.tokens,
               read=x.nbytes + inverse.nbytes, formula="permute_rows")  # fmt: skip
