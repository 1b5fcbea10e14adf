"""The loss that the folds of a layer cause in its products, from counts and energies of the operands.

    q, sf --fold--> qf, target          of every operand, in a frontend
      counts    nonzero, rounded, flushed                                  (plan_loss.py)
      signal    per row and block of 32 along the contraction dim: the sum of value^2
      noise     the same of (value - folded value)^2

    product a x b^T     row i of a:   sum over blocks of noise_a[i] * energy_b
                                      ----------------------------------------   the relative error of row i of the
                                      sum over blocks of signal_a[i] * energy_b  product, mean over random signs

The mean over rows is the loss of the product. The ratio of noise_a to signal_a alone is not: if some channels of x are
2^16 larger and their weights 2^16 smaller, all channels contribute equally to the product, while a fold of x flushes
many small channels and still has 90 dB of its own energy.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..formats import BLOCK, E8M0_NAN, SPAN, STAGE

ADVISED_DB = 40.0
"""The report advises against folds below this SQNR of a product. MXFP8 alone has 27 to 30 dB; an operand at 40 dB costs
another 0.3 dB."""
OPERANDS = {
    **dict.fromkeys(("x", "w1", "w3"), "D"),
    **dict.fromkeys(("h", "w2"), "F"),
    **dict.fromkeys(("dout", "w2_t"), "D"),
    **dict.fromkeys(("dgate", "w1_t", "dup", "w3_t"), "F"),
    **dict.fromkeys(("x_t", "dgate_t", "dup_t", "h_t", "dout_t"), "tokens"),
}
"""Operands of the products of recipe "mxfp8" and the dim of their scales: forward, input gradient, weight gradient."""
PRODUCTS = (
    *(("x", "w1"), ("x", "w3"), ("h", "w2")),
    *(("dout", "w2_t"), ("dgate", "w1_t"), ("dup", "w3_t")),
    *(("dgate_t", "x_t"), ("dup_t", "x_t"), ("dout_t", "h_t")),
)
BALANCED = {"x": ("w1", "w3"), "h": ("w2",), "dout": ("w2_t",), "dgate": ("w1_t",), "dup": ("w3_t",)}
"""The rows and the weights that a balanced fold moves blocks between: those of one launch share their levels."""


class Measured(NamedTuple):
    """Measurements of one operand of R rows and B blocks.

    counts: nonzero, rounded, flushed. signal, noise: (R, B) fp32, in units of 2^(2 (top - 127)) of the row. top: (R,)
    uint8, the largest target scale byte of the row. groups: the rows of each expert, or a single group of all rows if
    the blocks run along the tokens. balanced, stepped: the same of these folds, of operands along the rows. apart: the
    share of 32 rows and 128 of K in which the stepped one has a block apart.
    """

    counts: tuple[int, int, int]
    signal: np.ndarray
    noise: np.ndarray
    top: np.ndarray
    groups: tuple[slice, ...]
    balanced: "Measured | None" = None
    stepped: "Measured | None" = None
    apart: float = 0.0

    def sizes(self) -> np.ndarray:
        """(R,) fp32: 2^(2 (top - 127)) of each row, relative to the largest row; 0 for a row of NaN."""
        top = np.where(self.top == E8M0_NAN, 0, self.top).astype(np.int32)
        return np.ldexp(np.float32(1), np.maximum(2 * (top - top.max(initial=0)), -126)) * (self.top != E8M0_NAN)

    def sqnr_db(self) -> float:
        """SQNR of the folded operand against the unfolded one."""
        size = self.sizes().astype(np.float64)
        return decibels(size @ self.signal.sum(1, np.float64), size @ self.noise.sum(1, np.float64))

    def product_db(self, other: "Measured") -> float:
        """SQNR of the product with the other operand after folding this operand."""
        size, shares = other.sizes(), []
        for rows, columns in zip(self.groups, other.groups, strict=True):
            energy = size[columns] @ other.signal[columns]
            signal, noise = self.signal[rows] @ energy, self.noise[rows] @ energy
            shares.append(noise[signal > 0] / signal[signal > 0])
        share = np.concatenate(shares)
        return decibels(len(share), share.sum(dtype=np.float64))


class OperandLoss(NamedTuple):
    """The loss of one operand.

    along: the dim of the blocks of 32: "D", "F" or "tokens".
    nonzero: number of nonzero values; rounded, flushed: how many of them lose bits, and how many become zero.
    sqnr_db: SQNR of the folded operand against the unfolded one.
    product_db: SQNR of the products with this operand folded against the unfolded products; the smallest of them. All
        rows have equal weight, and the value is the mean over random signs of the operand's values.
    balanced_db, stepped_db: the same with compute="balanced" and "stepped", and apart: the share of 32 rows and 128 of
        K that "stepped" multiplies 32 terms at a time; None along the tokens, where both fold as "fold" does.
    """

    along: str
    nonzero: int
    rounded: int
    flushed: int
    sqnr_db: float
    product_db: float
    balanced_db: float | None = None
    stepped_db: float | None = None
    apart: float | None = None


@dataclass(frozen=True)
class NumericsReport:
    """The loss that `compute="fold"` causes in the operands of a layer; `print` shows it as a table.

    operands: by name, in the order of forward, input gradient and weight gradient. "x", "w1", "w3", "h", "w2", "dout",
        "dgate", "dup" as in the layer; "_t" marks operands along the other dim.
    """

    operands: Mapping[str, OperandLoss]

    def worst(self) -> str:
        """The name of the operand whose fold causes the largest loss in a product."""
        return min(self.operands, key=lambda name: self.operands[name].product_db)

    def lossy(self) -> tuple[str, ...]:
        """The operands whose fold leaves a product less than 40 dB. If there are any, use another compute."""
        return tuple(name for name, loss in self.operands.items() if loss.product_db < ADVISED_DB)

    def __str__(self) -> str:
        lines = [
            f"{'operand':8}{'along':>7}{'nonzero':>13}{'rounded':>10}{'flushed':>10}{'SQNR':>9}{'in products':>14}"
            f"{'balanced':>11}{'stepped':>11}{'apart':>10}"
        ]
        for name, loss in self.operands.items():
            shares = (f"{100 * count / max(loss.nonzero, 1):.3f}%" for count in (loss.rounded, loss.flushed))
            counts = f"{loss.nonzero:13}{next(shares):>10}{next(shares):>10}"
            line = f"{name:8}{loss.along:>7}{counts}{loss.sqnr_db:6.1f} dB{loss.product_db:11.1f} dB"
            for db in (loss.balanced_db, loss.stepped_db):
                line += "" if db is None else f"{db:8.1f} dB"
            line += "" if loss.apart is None else f"{100 * loss.apart:9.2f}%"
            lines.append(line)
        return "\n".join((*lines, self._advice()))

    def _advice(self) -> str:
        worst = self.worst()
        least = f"Folding {worst} leaves {self.operands[worst].product_db:.1f} dB of its products, the least of all"
        if self.lossy():
            better = next((name for name in ("balanced", "stepped") if self._is_enough(name)), "exact")
            lossy = f"{', '.join(self.lossy())} below {ADVISED_DB:.0f} dB"
            return f"{least}.\nUse compute={better!r}: {lossy}, where MXFP8 itself has 27 to 30."
        return f"{least}.\ncompute='fold' is safe here: MXFP8 itself has 27 to 30 dB."

    def _is_enough(self, compute: str) -> bool:
        """Whether every product keeps 40 dB with another fold, which has all operands but those along the tokens."""
        found = {name: getattr(loss, f"{compute}_db") for name, loss in self.operands.items()}
        return all((self.operands[name].product_db if db is None else db) >= ADVISED_DB for name, db in found.items())


def report(measured: Mapping[str, Measured]) -> NumericsReport:
    """The report of the measured operands. A product needs both of its operands."""
    folds = ("folded", "balanced", "stepped")
    least = {fold: dict.fromkeys(measured, np.inf) for fold in folds}
    for pair in PRODUCTS:
        for name, other in (pair, pair[::-1]) if pair[0] in measured else ():
            of = measured[name]
            for fold, way in zip(folds, (of, of.balanced, of.stepped), strict=True):
                if way:
                    least[fold][name] = min(least[fold][name], way.product_db(measured[other]))
    losses = {}
    for name, along in OPERANDS.items():
        if name in measured:
            of = measured[name]
            losses[name] = OperandLoss(along, *of.counts, of.sqnr_db(), least["folded"][name])
            if of.balanced:
                losses[name] = losses[name]._replace(balanced_db=least["balanced"][name])
            if of.stepped:
                losses[name] = losses[name]._replace(stepped_db=least["stepped"][name], apart=of.apart)
    return NumericsReport(losses)


def share_apart(apart: np.ndarray, blocks: int, rows: int) -> float:
    """Of `apart` (lines, words) of stepped rows with this number of blocks, the share of stages, 32 rows and 128 of K,
    with a block apart in the lines of the first rows.

    >>> share_apart(np.array([[1], [0x33], [0]], np.int32), 8, 64)
    0.75
    """
    apart = np.ascontiguousarray(apart[: -(-rows // BLOCK)]).astype("<i4")
    of_stages = np.unpackbits(apart.view(np.uint8), axis=-1, bitorder="little").reshape(-1, STAGE // BLOCK).any(-1)
    return int(of_stages.sum()) / max(apart[..., 0].size * -(-blocks * BLOCK // STAGE), 1)


def decibels(signal: float, noise: float) -> float:
    """10 log10(signal / noise); infinite without noise.

    >>> decibels(200.0, 2.0)
    20.0
    """
    return float(10 * np.log10(signal / noise)) if noise > 0 else np.inf


def row_slices(group_ends: np.ndarray) -> tuple[slice, ...]:
    """The rows of each group.

    >>> row_slices(np.array([32, 96]))
    (slice(0, 32, None), slice(32, 96, None))
    """
    return tuple(slice(int(a), int(b)) for a, b in zip([0, *group_ends], group_ends, strict=False))


def slots_of_blocks(group_ends: np.ndarray, num_blocks: int) -> np.ndarray:
    """The slot of each block's span in the span_sf of `fold_groups`; -1 past the last end.

    >>> slots_of_blocks(np.array([288, 320]), 11)
    array([ 0,  0,  0,  0,  0,  0,  0,  0,  1,  2, -1])
    """
    token = np.arange(num_blocks) * BLOCK
    group = np.searchsorted(group_ends, token, side="right")
    start = np.concatenate([[0], group_ends])[group]
    slot = start // SPAN + group + (token - start) // SPAN
    return np.where(group < len(group_ends), slot, -1)
