"""Which Linear layers of a model gain from a recipe, by their names and sizes.

A layer of M rows multiplies three times M N K values, at twice the rate of bf16, and quantizes x, dout and its weight:
four bytes for each value, in bf16. Layers that read the same x share its operands, and are chosen together.
"""

from collections.abc import Mapping, Sequence

from ..formats import BLOCK

SAME_ROWS = (
    ("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("wq", "wk", "wv"), ("to_q", "to_k", "to_v"),
    ("gate_proj", "up_proj"), ("w1", "w3"), ("wi_0", "wi_1"),
)  # fmt: skip
"""Names of layers of one module that read the same x: of transformers, BERT, torchtitan, diffusers and MaxText."""
HEADS = {"lm_head", "head", "output", "logits", "logits_dense", "classifier", "score", "embed_out", "unembed"}
"""Names of heads, outside of numbered blocks."""
ROUTERS = {"router", "gate", "wg", "shared_expert_gate"}
"""Names of routers, if they have fewer outputs than inputs."""
LEAST = 1024.0
"""The least N K / (N + K) of layers that gain: 1 / N + 1 / K is the number of operand bytes per multiplication."""

Sizes = tuple[int, int]
"""N and K."""


def same_rows(sizes: Mapping[str, Sizes]) -> list[list[str]]:
    """The layers that read the same x, by their names.

    Args:
        sizes: N and K of every layer by its name, with dots between the parts.

    Returns:
        Lists of names, each of one module and one K. A layer without others is in no list or alone in one.

    Example:
        >>> same_rows({"0.q_proj": (64, 32), "0.k_proj": (32, 32), "0.o_proj": (32, 64)})
        [['0.q_proj', '0.k_proj']]
    """
    groups = []
    for parent in dict.fromkeys(name.rpartition(".")[0] for name in sizes):
        for names in SAME_ROWS:
            found = [name for each in names if (name := f"{parent}.{each}".lstrip(".")) in sizes]
            if len({sizes[name][1] for name in found}) == 1:
                groups.append(found)
    return groups


def why_unconverted(name: str, sizes: Mapping[str, Sizes], groups: Sequence[Sequence[str]]) -> str:
    """Why a layer gains nothing from a recipe.

    Args:
        name: of the layer.
        sizes: as in `same_rows`.
        groups: of `same_rows`.

    Returns:
        The reason, "" for a layer that gains.

    Example:
        >>> sizes = {"q_proj": (4096, 4096), "k_proj": (1024, 4096), "o_proj": (1024, 1024), "lm_head": (32000, 4096)}
        >>> [why_unconverted(name, sizes, same_rows(sizes)) for name in sizes]
        ['', '', 'too small to gain, N K / (N + K) = 512', 'a head']
    """
    *path, last = name.split(".")
    n, k = sizes[name]
    if last in HEADS and not any(part.isdigit() for part in path):
        return "a head"
    if last in ROUTERS and n < k:
        return "a router"
    for size, value in (("N", n), ("K", k)):
        if value % BLOCK or not value:
            return f"{size} = {value} is no positive multiple of {BLOCK}"
    group = next((group for group in groups if name in group), [name])
    total = sum(sizes[each][0] for each in group)
    gain = total * k / (total + k)
    return f"too small to gain, N K / (N + K) = {gain:.0f}" if gain < LEAST else ""
