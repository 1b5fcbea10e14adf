"""The loss that the folds of a layer cause in its products, computed on the host from the bytes of the operands.

    x, dout, weights of a frontend --its ops, exact products--> q, sf of every operand --fold--> qf, sf

      counts    nonzero, rounded, flushed
      signal    per row and block of 32 along the contraction dim: the sum of value^2
      noise     the same of (value - folded value)^2

    product a x b^T     row i of a:   sum over blocks of noise_a[i] * energy_b
                                      ----------------------------------------   the relative error of row i of the
                                      sum over blocks of signal_a[i] * energy_b  product, mean over random signs

The mean over rows is the loss of the product. The ratio of noise_a to signal_a alone is not: if some channels of x are
2^16 larger and their weights 2^16 smaller, all channels contribute equally to the product, while a fold of x flushes
many small channels and still has 90 dB of its own energy.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..formats import BLOCK, E8M0_NAN, GRADIENT_HEADROOM, SPAN, WEIGHT_HEADROOM
from ..oracle_math import E4M3_VALUES, Array
from .recipe import Recipe

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
_VALUES = np.nan_to_num(E4M3_VALUES).astype(np.float32)
_AT_ONCE = 1 << 20
"""Values whose temporary arrays, in fp32, stay in a CPU's cache."""


class OperandLoss(NamedTuple):
    """The loss of one operand.

    Attributes:
        along: the dim of the blocks of 32: "D", "F" or "tokens".
        nonzero: number of nonzero values.
        rounded: how many of them lose bits.
        flushed: how many of them become zero.
        sqnr_db: SQNR of the folded operand against the unfolded one.
        product_db: SQNR of the products with this operand folded against the unfolded products; the smallest of them.
            All rows have equal weight, and the value is the mean over random signs of the operand's values.
    """

    along: str
    nonzero: int
    rounded: int
    flushed: int
    sqnr_db: float
    product_db: float


@dataclass(frozen=True)
class NumericsReport:
    """The loss that `compute="fold"` causes in the operands of a layer; `print` shows it as a table.

    Attributes:
        operands: by name, in the order of forward, input gradient and weight gradient. "x", "w1", "w3", "h", "w2",
            "dout", "dgate", "dup" as in the layer; "_t" marks operands along the other dim.

    Example:
        >>> loss = OperandLoss("D", nonzero=100, rounded=1, flushed=0, sqnr_db=60.0, product_db=50.0)
        >>> report = NumericsReport({"x": loss, "w1": loss._replace(product_db=30.0)})
        >>> print(report)
        operand   along      nonzero   rounded   flushed     SQNR   in products
        x             D          100    1.000%    0.000%  60.0 dB       50.0 dB
        w1            D          100    1.000%    0.000%  60.0 dB       30.0 dB
        Folding w1 leaves 30.0 dB of its products, the least of all.
        Use compute='exact' or recipe 'fp8_blockwise': w1 below 40 dB, where MXFP8 itself has 27 to 30.
    """

    operands: Mapping[str, OperandLoss]

    def worst(self) -> str:
        """Return the operand whose fold causes the largest loss in a product.

        Returns:
            The name of the operand.

        Example:
            >>> loss = OperandLoss("D", nonzero=100, rounded=1, flushed=0, sqnr_db=60.0, product_db=50.0)
            >>> NumericsReport({"x": loss, "w1": loss._replace(product_db=30.0)}).worst()
            'w1'
        """
        return min(self.operands, key=lambda name: self.operands[name].product_db)

    def lossy(self) -> tuple[str, ...]:
        """Return the operands whose fold leaves a product less than 40 dB.

        If there are any, fold nothing: use `compute="exact"` or the recipe "fp8_blockwise".

        Returns:
            The names of the operands.

        Example:
            >>> loss = OperandLoss("D", nonzero=100, rounded=1, flushed=0, sqnr_db=60.0, product_db=50.0)
            >>> NumericsReport({"x": loss, "w1": loss._replace(product_db=30.0)}).lossy()
            ('w1',)
        """
        return tuple(name for name, loss in self.operands.items() if loss.product_db < ADVISED_DB)

    def __str__(self) -> str:
        names = f"{'operand':8}{'along':>7}{'nonzero':>13}{'rounded':>10}{'flushed':>10}{'SQNR':>9}{'in products':>14}"
        worst = self.worst()
        least = f"Folding {worst} leaves {self.operands[worst].product_db:.1f} dB of its products, the least of all."
        advice = "compute='fold' is safe here: MXFP8 itself has 27 to 30 dB."
        if lossy := ", ".join(self.lossy()):
            below = f"{lossy} below {ADVISED_DB:.0f} dB, where MXFP8 itself has 27 to 30."
            # This recipe folds tokens too.
            tokens = any(self.operands[name].along == "tokens" for name in self.lossy())
            recipe = "recipe 'fp8_blockwise'" + " with wgrad_with_hp=True" * tokens
            advice = f"Use compute='exact' or {recipe}: {below}"
        return "\n".join([names, *map(self._line, self.operands), least, advice])

    def _line(self, name: str) -> str:
        of = self.operands[name]
        rounded, flushed = (f"{100 * count / max(of.nonzero, 1):.3f}%" for count in (of.rounded, of.flushed))
        counts = f"{of.nonzero:13}{rounded:>10}{flushed:>10}"
        return f"{name:8}{of.along:>7}{counts}{of.sqnr_db:6.1f} dB{of.product_db:11.1f} dB"


class Measured(NamedTuple):
    """Measurements of one operand of R rows and B blocks.

    Attributes:
        counts: nonzero, rounded, flushed.
        signal: (R, B) fp32, in a unit of the row.
        noise: (R, B) fp32, in a unit of the row.
        size: (R,) fp32, these units relative to the largest.
        groups: the rows of each expert, or a single group of all rows if the blocks run along the tokens.
    """

    counts: tuple[int, int, int]
    signal: Array
    noise: Array
    size: Array
    groups: tuple[slice, ...]

    def sqnr_db(self) -> float:
        """SQNR of the folded operand against the unfolded one.

        Returns:
            dB.
        """
        size = self.size.astype(np.float64)
        return decibels(size @ self.signal.sum(1, np.float64), size @ self.noise.sum(1, np.float64))

    def product_db(self, other: "Measured") -> float:
        """SQNR of the product with the other operand after folding this operand.

        Args:
            other: the measurements of the other operand.

        Returns:
            dB.
        """
        shares = []
        for rows, columns in zip(self.groups, other.groups, strict=True):
            energy = other.size[columns] @ other.signal[columns]
            signal, noise = self.signal[rows] @ energy, self.noise[rows] @ energy
            shares.append(noise[signal > 0] / signal[signal > 0])
        share = np.concatenate(shares)
        return decibels(len(share), share.sum(dtype=np.float64))


def report(
    ops: Any, to_numpy: Callable[[Any], Array], product: Callable[[Any, Any, Any], Any], recipe: Recipe,
    numbers: tuple[float, float, float], x: Any, dout: Any, prob: Any, ends: Any, weights: tuple[Any, Any, Any],
    biases: tuple[Any, Any],
) -> NumericsReport:  # fmt: skip
    """The report of a layer in a frontend, on P rows sorted by expert: forward, and backward as far as operands go.

    Args:
        ops: the frontend's.
        to_numpy: makes a numpy array of a frontend's array.
        product: product(x, w, bias), the exact product of (q, sf) pairs with bias (G, N) or None, in bf16. No operand
            then contains the error of an earlier fold.
        recipe: of the layer.
        numbers: alpha, limit and offset of SwiGLU.
        x: (P, D) MXFP8, q and sf.
        dout: (P, D) bf16.
        prob: (P,) fp32 in SwiGLU, or (0,).
        ends: (G,) of the groups.
        weights: w1, w3, w2.
        biases: b1, b3.

    Returns:
        The report.
    """
    (w1, w3, w2), rounding, host_ends = weights, int(recipe.rounding), to_numpy(ends)
    alpha, limit, offset = numbers
    of: dict[str, Measured] = {}

    def fold(name: str, pair: Any, headroom: int, ends: Array = host_ends) -> Any:
        """Measure the operand folded to one scale per row."""
        q, sf = pair
        q, sf, qf, row_sf = map(to_numpy, (q, sf, *ops.fold_rows(q, sf, headroom=headroom)))
        q, sf, qf = (part.reshape(-1, part.shape[-1]) for part in (q, sf, qf))
        of[name] = measure(q, sf, qf, np.broadcast_to(row_sf.reshape(-1, 1), sf.shape), row_slices(ends))
        return pair

    def weight(name: str, pair: Any) -> Any:
        groups, rows, _ = pair[0].shape
        return fold(name, pair, WEIGHT_HEADROOM, np.arange(1, groups + 1) * rows)

    def tokens(name: str, pair: Any) -> None:
        """Measure the operand folded to one scale per row and chunk of 256 tokens."""
        q, sf = pair
        q, sf, qf, span_sf = map(to_numpy, (q, sf, *ops.fold_groups(q, sf, ends)))
        slots = slots_of_blocks(host_ends, sf.shape[1])
        target = np.where(slots < 0, np.uint8(E8M0_NAN), span_sf[np.maximum(slots, 0)].T)
        of[name] = measure(q, sf, qf, target, (slice(0, len(q)),))

    fold("x", x, 0)
    gate = product(x, weight("w1", ops.quantize_row(w1, rounding)), biases[0])
    up = product(x, weight("w3", ops.quantize_row(w3, rounding)), biases[1])
    fold("h", ops.swiglu_row(gate, up, prob, rounding, False, alpha, limit, offset), 0)
    weight("w2", ops.quantize_row(w2, rounding))

    d = fold("dout", ops.quantize_row(dout, rounding), 0)
    dh = product(d, weight("w2_t", ops.quantize_col(w2, rounding)), None)
    dgate, dup, _ = ops.swiglu_bwd(dh, gate, up, prob, None, alpha, limit, offset)
    fold("dgate", ops.quantize_row(dgate, rounding), GRADIENT_HEADROOM)
    weight("w1_t", ops.quantize_col(w1, rounding))
    fold("dup", ops.quantize_row(dup, rounding), GRADIENT_HEADROOM)
    weight("w3_t", ops.quantize_col(w3, rounding))

    if recipe.wgrad_mx:
        x_q, x_sf = x
        tokens("x_t", ops.quantize_col(ops.dequantize(x_q, x_sf), rounding))
        tokens("dgate_t", ops.quantize_col(dgate, rounding))
        tokens("dup_t", ops.quantize_col(dup, rounding))
        tokens("h_t", ops.swiglu_col(gate, up, prob, rounding, False, alpha, limit, offset))
        d_q, d_sf = d
        tokens("dout_t", ops.quantize_col(ops.dequantize(d_q, d_sf), rounding))

    least = dict.fromkeys(of, np.inf)
    for pair in PRODUCTS:
        for name, other in (pair, pair[::-1]) if pair[0] in of else ():
            least[name] = min(least[name], of[name].product_db(of[other]))
    losses = {}
    for name, measured in of.items():
        nonzero, rounded, flushed = measured.counts
        losses[name] = OperandLoss(OPERANDS[name], nonzero, rounded, flushed, measured.sqnr_db(), least[name])
    return NumericsReport(losses)


def measure(q: Array, sf: Array, qf: Array, target: Array, groups: tuple[slice, ...]) -> Measured:
    """Measure the fold of one operand.

    A block whose sf or target is 255 counts as zeros.

    Args:
        q: (R, K) uint8, E4M3.
        sf: (R, K/32) uint8, E8M0 scales of q.
        qf: (R, K) uint8, the folded q.
        target: (R, K/32) uint8, the scale of each folded block, at least sf.
        groups: the rows of each expert.

    Returns:
        The measurements.

    Example:
        >>> q = np.full((3, 32), 0x39, np.uint8)  # 1.125
        >>> sf = np.uint8([[121], [120], [111]])  # 1.125 * 2^-6 is 9 * 2^-9, one octave below it is 4.5 * 2^-9
        >>> qf = np.repeat(np.uint8([[0x09], [0x04], [0x00]]), 32, 1)  # under the scale 2^0
        >>> measure(q, sf, qf, np.full((3, 1), 127, np.uint8), (slice(0, 3),)).counts
        (96, 32, 32)
    """
    known = (sf != E8M0_NAN) & (target != E8M0_NAN)
    top = np.where(known, target, 0).max(1, initial=0).astype(np.int32)  # the unit of a row: the square of this scale
    size = np.ldexp(np.float32(1), np.maximum(2 * (top - top.max(initial=0)), -126))
    # Beyond 2^60 the fold flushes every value, and the squares remain fp32 numbers.
    octaves = np.clip(target.astype(np.int32) - sf, 0, 60)
    unit = np.ldexp(known.astype(np.float32), 2 * np.clip(sf.astype(np.int32) - top[:, None], -60, 0))
    signal, noise = np.empty(sf.shape, np.float32), np.empty(sf.shape, np.float32)
    nonzero = rounded = flushed = 0
    step = max(_AT_ONCE // max(q.shape[1], 1), 1)
    for at in (slice(first, first + step) for first in range(0, len(q), step)):
        shape = (*sf[at].shape, BLOCK)
        # In units of the block's own scale.
        value = _VALUES.take(q[at]).reshape(shape) * known[at, :, None]
        folded = _VALUES.take(qf[at]).reshape(shape) * np.ldexp(known[at].astype(np.float32), octaves[at])[..., None]
        lost = value - folded
        signal[at], noise[at] = (np.einsum("rbi,rbi->rb", x, x) for x in (value, lost))
        present, changed, left = (int(np.count_nonzero(x)) for x in (value, lost, folded))
        nonzero, flushed = nonzero + present, flushed + present - left
        rounded += changed - (present - left)
    return Measured((nonzero, rounded, flushed), signal * unit, noise * unit, size, groups)


def decibels(signal: float, noise: float) -> float:
    """10 log10(signal / noise); infinite without noise.

    Args:
        signal: energy of the values.
        noise: energy of the errors, in the same unit.

    Returns:
        dB.

    Example:
        >>> decibels(200.0, 2.0)
        20.0
    """
    return float(10 * np.log10(signal / noise)) if noise > 0 else np.inf


def row_slices(group_ends: Array) -> tuple[slice, ...]:
    """The rows of each group.

    Args:
        group_ends: (G,) integers, the end of each group.

    Returns:
        A slice per group.

    Example:
        >>> row_slices(np.array([32, 96]))
        (slice(0, 32, None), slice(32, 96, None))
    """
    return tuple(slice(int(a), int(b)) for a, b in zip([0, *group_ends], group_ends, strict=False))


def slots_of_blocks(group_ends: Array, num_blocks: int) -> Array:
    """The slot of each block's span in the span_sf of `fold_groups`; -1 past the last end.

    Args:
        group_ends: (G,) integers, the end of each group, multiples of 32.
        num_blocks: blocks of 32 tokens.

    Returns:
        (num_blocks,) integers.

    Example:
        >>> slots_of_blocks(np.array([288, 320]), 11)
        array([ 0,  0,  0,  0,  0,  0,  0,  0,  1,  2, -1])
    """
    token = np.arange(num_blocks) * BLOCK
    group = np.searchsorted(group_ends, token, side="right")
    start = np.concatenate([[0], group_ends])[group]
    slot = start // SPAN + group + (token - start) // SPAN
    return np.where(group < len(group_ends), slot, -1)
