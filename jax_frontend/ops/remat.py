"""What a layer saves for its gradient, by name, and policies of `jax.checkpoint` made of these names.

    "mxep_rows"      the rows of padded groups that dispatch returns, MXFP8 bytes if the recipe quantizes
    "mxep_gate"      x w1^T, bf16; with "mxep_up" the largest of all
    "mxep_up"        x w3^T, bf16
    "mxep_outputs"   the experts' outputs back at their tokens, bf16; `combine` with probabilities needs them

A value that is not saved is computed again in the backward pass, with the exchange in front of it. The exchange is the
dispatch for "mxep_rows", the combine for "mxep_outputs". With prob_in="swiglu" the combine saves no outputs.
"""

from typing import TypeVar

import jax
from jax.ad_checkpoint import checkpoint_name

from .mx_array import MXArray

ROWS, GATE, UP, OUTPUTS = NAMES = ("mxep_rows", "mxep_gate", "mxep_up", "mxep_outputs")

Rows = TypeVar("Rows", jax.Array, MXArray)

save_mx_rows = jax.checkpoint_policies.save_only_these_names(ROWS)
"""Save the rows of the groups alone, 33/64 of their bytes in bf16: the backward repeats no dispatch, and multiplies the
experts again.

    layer = jax.checkpoint(partial(moe.apply, config=config), policy=save_mx_rows)

Other names: `jax.checkpoint_policies.save_only_these_names("mxep_rows", "mxep_outputs")`."""


def named(x: Rows, name: str) -> Rows:
    """x with a name. Of an MXArray the gathered bytes and their source have it; the companion is zeros. A policy saves
    those that the backward reads."""
    if not isinstance(x, MXArray):
        return checkpoint_name(x, name)
    q, sf, source = jax.tree.map(lambda leaf: checkpoint_name(leaf, name), (x.q, x.sf, x.source))
    return MXArray(q, sf, x.carrier, source=source)
