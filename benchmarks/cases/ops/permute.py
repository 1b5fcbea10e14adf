"""Cases of the family `permute`: received rows to padded groups per expert, also folded, and back."""

from collections.abc import Iterator

import numpy as np
import torch
from mxep.core_kernels.cases import Layer
from mxep.core_kernels.permute.cases import TIMED

from ..case import Call, Case, gather_part, values


def cases(layer: Layer, call: Call, device: str) -> Iterator[Case]:
    """Packed rows after an all-to-all, sorted by sender, with the row map of a skewed routing."""
    m, g, (mx, fold, back) = layer.tokens, layer.local_experts, TIMED
    x, rng = values(m, layer.dim, device=device), np.random.default_rng(m)
    shares = rng.dirichlet(np.full(layer.sizes["ranks"] * g, 4.0))
    counts = torch.from_numpy(rng.multinomial(m, shares).astype(np.int32)).to(device)
    row_map, inverse, *_ = call("row_map", counts, num_rows=m, num_local_experts=g)
    (packed,) = call("quantize_row_packed", x)
    yield Case(mx, layer, (packed, row_map), gather_part, len(row_map), formula=mx.name)
    yield Case(fold, layer, (packed, row_map), gather_part, len(row_map))
    del packed
    (padded,) = call("permute_rows", x, row_map)
    yield Case(back, layer, (padded, inverse), gather_part, m, formula=back.ops[0], read=x.nbytes + inverse.nbytes)
