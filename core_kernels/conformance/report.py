"""A report: the cases of each op, and the rules that a quantizer's blocks obey; differing blocks in bits."""

from dataclasses import dataclass, field

import numpy as np

from ..formats import E8M0_NAN, Rounding
from . import rules
from .blocks import Blocks
from .compare import show_bits
from .rules_scale import TEXT

MOST_RULES = 4
"""Of a mixture: the rules that are shown, each with the first block that breaks it."""


@dataclass
class Ran:
    """The cases of an op. differ: name of a case -> the message. skipped: name -> the reason. digests: name of a case
    -> of its outputs."""

    agree: list[str] = field(default_factory=list)
    differ: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)


@dataclass
class Found:
    """The rules of a quantizer under one mode.

    verdicts: aspect -> the rule that all blocks obey, or rules that these blocks do not tell apart; "" where none was
    judged. broken: aspect -> why the definition does not hold.
    """

    rounding: str
    satfinite: bool
    claimed: bool
    verdicts: dict[str, str] = field(default_factory=dict)
    judged: dict[str, int] = field(default_factory=dict)
    broken: dict[str, str] = field(default_factory=dict)


@dataclass
class Report:
    """ops: op -> Ran. rules: op or "op, mode" -> Found. lacking: ops of the table that the backend does not have.
    without_cases: ops that it has and the table lacks. versions: package -> version. source: of transcribed formulas.
    """

    backend: str
    versions: dict[str, str] = field(default_factory=dict)
    source: str = ""
    ops: dict[str, Ran] = field(default_factory=dict)
    rules: dict[str, Found] = field(default_factory=dict)
    lacking: list[str] = field(default_factory=list)
    without_cases: list[str] = field(default_factory=list)

    @property
    def ran(self) -> bool:
        """Whether a case was compared: not all are skipped."""
        return any(ran.agree or ran.differ for ran in self.ops.values())

    @property
    def agrees(self) -> bool:
        return not any(ran.differ for ran in self.ops.values())


def found_rules(
    blocks: Blocks, origin: list[tuple[str, int]], rounding: Rounding, satfinite: bool, claimed: bool
) -> Found:
    """The rules that these blocks obey, next to the definition of a mode. origin: names of cases, and their blocks."""
    found = Found(rounding.name, satfinite, claimed)
    wanted = rules.as_defined(rounding, satfinite)
    for aspect, verdict in rules.judge(blocks).items():
        obeyed, want = verdict.obeyed, wanted[aspect]
        found.judged[aspect] = verdict.judged
        found.verdicts[aspect] = want if want in obeyed else " or ".join(obeyed[:2])
        if not verdict.judged or want in obeyed:
            continue
        if obeyed:
            found.broken[aspect] = f"{found.verdicts[aspect]}, where the definition has: {want}"
        else:
            some = [rule for rule, count in verdict.obeying.items() if count]
            best = sorted(some, key=verdict.obeying.__getitem__, reverse=True)[:MOST_RULES]
            found.verdicts[aspect] = "no rule of these"
            parts = [
                f"{rule}: {verdict.obeying[rule]} of {verdict.judged} blocks, first broken by\n"
                + show_input(blocks, origin, verdict.first[rule])
                for rule in best
            ]
            found.broken[aspect] = "no rule holds for all blocks\n" + "\n".join(parts)
    return found


def _float(x: np.floating) -> str:
    return f"0x{int(np.float32(x).view(np.uint32)):08x} ({float(x):.9g})"


def show_input(blocks: Blocks, origin: list[tuple[str, int]], block: int) -> str:
    """Where a block is, its amax and its scale."""
    amax, sf, start = blocks.amax[block], int(blocks.sf[block]), 0
    for name, size in origin:
        if block < start + size:
            return f"  {name}, block {block - start}: amax {_float(amax)}, scale {_scale(sf)}"
        start += size
    raise IndexError(block)


def _scale(sf: int) -> str:
    return f"{sf:08b} ({'NaN' if sf == E8M0_NAN else f'2^{sf - 127}'})"


def show_block(
    found: Blocks, expected: Blocks, block: int, rounding: Rounding, satfinite: bool
) -> str:  # fmt: skip
    """A block that differs: its input, and the first differing bytes of both sides."""
    aspect = rules.broken_aspect(found, block, rounding, satfinite)
    lines = [f"block {block}: amax {_float(found.amax[block])}"]
    got, want = int(found.sf[block]), int(expected.sf[block])
    lines.append(f"  scale       {_scale(got)}" + (f", expected {_scale(want)}" if got != want else ""))
    differ = found.q[block] != expected.q[block]
    if differ.any():
        i = int(np.argmax(differ))
        q, w = (show_bits(int(of.q[block, i]), of.q.dtype) for of in (found, expected))
        lines.append(f"  element {i:2}  {q}, expected {w}, of x = {_float(found.x[block, i])}; {differ.sum()} differ")
    if aspect:
        rule = rules.as_defined(rounding, satfinite)[aspect]
        text = f": {TEXT[rule]}" if rule in TEXT else ""
        lines.append(f"  breaks the rule of {aspect}: {rule}{text}")
    return "\n".join(lines)
