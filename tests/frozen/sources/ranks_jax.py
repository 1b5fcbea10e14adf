"""The layers of layers.RANKED in JAX, on two CPU devices of one process, by all-to-alls and by peer memory."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from mxep.jax_frontend import MoEConfig, PeerMemory, moe

from ..hashes import digits_of
from ..records import INPUTS, Case, Entry
from .layers import RANKED, RANKS, RankedLayer
from .layers_jax import config, named, tree

OVER_PEER_MEMORY = ("mxfp8 combine", "mxfp8 swiglu", "mxfp8 input")
SPLIT, WHOLE = PartitionSpec("ep"), PartitionSpec()


def cases() -> dict[str, Case]:
    memory = PeerMemory(_mesh(), "ep")
    runs: dict[str, tuple[RankedLayer, PeerMemory | None]] = {
        f"jax ranks {name}": (ranked, None) for name, ranked in RANKED.items() if ranked.in_jax
    }
    runs |= {f"jax ranks {name} peer_memory": (RANKED[name], memory) for name in OVER_PEER_MEMORY}
    return {name: Case("cpu_products", partial(entry, *run)) for name, run in runs.items()}


def _mesh() -> Mesh:
    return Mesh(np.array(jax.devices("cpu")[:RANKS]), ("ep",))


@partial(jax.jit, static_argnames="of")
def _results(params: Any, x: jax.Array, dy: jax.Array, of: MoEConfig) -> Any:
    """As layers_torch.results, of the tokens of all ranks."""
    specs = {name: SPLIT if name == "experts" else WHOLE for name in params}

    def one_rank(params: Any, x: jax.Array) -> tuple[tuple[jax.Array, jax.Array], Any]:
        y, stats = moe.apply(params, x, of, axis_name="ep")
        return (y, stats.aux_loss), stats

    def layer(params: Any, x: jax.Array) -> Any:
        outputs = (SPLIT, WHOLE), WHOLE
        return jax.shard_map(one_rank, mesh=_mesh(), in_specs=(specs, SPLIT), out_specs=outputs)(params, x)

    (y, aux_loss), backward, stats = jax.vjp(layer, params, x, has_aux=True)
    grads, dx = backward((dy, jnp.ones_like(aux_loss)))
    return {"y": y, **stats._asdict(), "x": dx, **grads}


def entry(ranked: RankedLayer, transport: PeerMemory | None) -> Entry:
    layer = ranked.layer
    options = config(layer, deduplicate=ranked.deduplicate, transport=transport)
    found = _results(tree(layer), layer.x, layer.dy, of=options)
    return {INPUTS: layer.digits, **{name: digits_of(value) for name, value in named(found).items()}}
