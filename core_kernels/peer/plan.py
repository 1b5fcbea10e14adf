"""Rows that kernels write into the memory of other GPUs and read out of it, with every size on the device.

    counts (E,) --share_counts--> table (ranks, E) on every rank
    table --lay_out--> positions (M,) int64       rank << 32 | row of each row, -1 without a position
                       group_ends, filled_ends    of this rank's padded groups, and the end of their rows
    rows (T, K) --push--> row of each replica in the memory of its expert's rank
    sums (T, D) <--pull-- rows in the memory of the ranks

The layout is defined in oracle.py: one padded group per local expert, in it the rows of rank 0, 1, ... A row past the
capacity of the memory has no position. It makes the sums of its token NaN, or is zero in them (drop).

These kernels are no ops of the registry: they write into memory that no argument names, at addresses of a table
(ranks,) int64. This file has their constexprs.
"""

from ..formats import BLOCK
from ..tiles import next_power_of_2

WORDS = (("int64", 8), ("int32", 4), ("uint8", 1))
BLOCK_WORDS = 512
"""Words of a row that a program holds: 4 KiB, 32 bytes per thread."""
BLOCK_VALUES = 1024
"""Values of a row that a program sums."""


def capacity_of(rows: int, local_experts: int, alignment: int) -> int:
    """Rows of the padded groups of any split of `rows` rows, a multiple of `alignment`.

    >>> capacity_of(100, 2, 32)
    192
    """
    return -(-(rows + local_experts * alignment) // alignment) * alignment


def words_of(nbytes: int) -> tuple[str, int]:
    """The dtype in which a row of `nbytes` bytes is copied, and the number of words.

    >>> words_of(64), words_of(6)
    (('int64', 8), ('uint8', 6))
    """
    dtype, size = next((dtype, size) for dtype, size in WORDS if nbytes % size == 0)
    return dtype, nbytes // size


def _block(words: int) -> int:
    return min(next_power_of_2(max(words, 1)), BLOCK_WORDS)


def share_counts(experts: int) -> dict[str, int]:
    return {"E": experts, "BLOCK_E": next_power_of_2(experts)}


def lay_out(experts: int, ranks: int, alignment: int, whole: bool = False) -> dict[str, int]:
    """whole: of a round (core_kernels/policy/rounds.py)."""
    local = experts // ranks
    blocks = {"BLOCK_E": next_power_of_2(experts), "BLOCK_L": next_power_of_2(local), "BLOCK_M": 1024}
    return {"E": experts, "L": local, "RANKS": ranks, "ALIGNMENT": alignment, "WHOLE": whole, **blocks}


def push(values: int, scales: int, scale_size: int, top_k: int, replicas: bool, weighted: bool) -> dict[str, int]:
    """values, scales: words per row, scales of `scale_size` bytes each."""
    blocks = {"BLOCK_V": _block(values), "BLOCK_S": _block(scales)}
    flags = {"K": top_k, "REPLICAS": replicas, "WEIGHTED": weighted}
    return {"VALUES": values, "SCALES": scales, "SCALE_SIZE": scale_size, **flags, **blocks}


def clear(values: int, scales: int, groups: int, weighted: bool) -> dict[str, int]:
    blocks = {"BLOCK_V": min(_block(values), 256), "BLOCK_S": min(_block(scales), 256)}
    sizes = {"VALUES": values, "SCALES": scales, "GROUPS": groups, "WEIGHTED": weighted}
    return {**sizes, "BLOCK_G": next_power_of_2(groups), "BLOCK_M": BLOCK, **blocks}


def pull(
    width: int, top_k: int, replicas: bool, mx: bool, wide: bool, hw_cast: bool, slots: bool = False,
    drop: bool = False,
) -> dict[str, int]:  # fmt: skip
    """wide: rows of fp32, not of bf16; of MX rows the dtype to which their values are rounded. drop: a row without a
    position is zero."""
    block = max(min(next_power_of_2(width), BLOCK_VALUES), BLOCK)
    flags = {"REPLICAS": replicas, "MX": mx, "WIDE": wide, "HW_CAST": hw_cast}
    return {"D": width, "K": top_k, **flags, "BLOCK_D": block, "SLOTS": slots, "NAN": not drop}


def pull_weights(slots: bool = False, drop: bool = False) -> dict[str, int]:
    return {"BLOCK_M": 256, "SLOTS": slots, "NAN": not drop}
