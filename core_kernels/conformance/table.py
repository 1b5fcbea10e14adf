"""A report as text and as JSON."""

import textwrap
from dataclasses import asdict
from typing import Any

from .report import Found, Report

DOCUMENTED = (
    *("quantize_row", "quantize_col", "dequantize", "block_scales", "grouped_mm_mx", "permute_rows", "combine"),
    *("swiglu_row", "swiglu_ffn"),
)
"""The ops of the table in docs/conformance.md."""


def show(report: Report) -> str:
    """A line for each op, the rules of its quantizers, the first difference of each op, and skipped cases."""
    lines = [", ".join([report.backend, *(f"{name} {version}" for name, version in report.versions.items())])]
    if report.source:
        lines.append(f"transcribed, not the library: {report.source}")
    lines += ["", f"{'op':24}{'agree':>7}{'differ':>8}{'skipped':>9}"]
    for op, ran in report.ops.items():
        lines.append(f"{op:24}{len(ran.agree):7}{len(ran.differ):8}{len(ran.skipped):9}")
    lacking = [op for op in DOCUMENTED if op in report.lacking]
    others = len(report.lacking) - len(lacking)
    if report.lacking:
        lines.append(f"no function: {'; and '.join([*filter(None, [', '.join(lacking)]), f'{others} other ops'])}")
    if report.without_cases:
        lines.append(f"no case of: {', '.join(report.without_cases)}")
    for key, found in report.rules.items():
        lines += ["", f"rules of {key}: {summary(found)}", *_rules(found)]
    for op, ran in report.ops.items():
        if ran.differ:
            name, message = next(iter(ran.differ.items()))
            lines += ["", f"{op} differs first in {name}", textwrap.indent(message, "  ")]
    reasons: dict[tuple[str, str], int] = {}
    for op, ran in report.ops.items():
        for reason in ran.skipped.values():
            reasons[op, reason] = reasons.get((op, reason), 0) + 1
    if reasons:
        lines += ["", "skipped"]
        lines += [f"  {op}: {count} cases: {reason}" for (op, reason), count in reasons.items()]
    lines += ["", _closing(report)]
    return "\n".join(lines)


def _closing(report: Report) -> str:
    if not report.ran:
        return "No case ran."
    return "All that ran agrees." if report.agrees else "Not all agrees."


def summary(found: Found) -> str:
    """The rule of scales, whether an infinity and an overflow saturate, and the rule of NaN."""
    rules = found.verdicts
    return "; ".join(
        f"{aspect}: {rules[aspect] or 'does not occur'}" for aspect in ("scale", "overflow", "infinity", "NaN")
    )


def _rules(found: Found) -> list[str]:
    said = f"{'claims' if found.claimed else 'nearest to'} {found.rounding}{', satfinite' * found.satfinite}"
    if not any(found.judged.values()):
        return [f"  {said}: no block was judged"]
    if not found.broken:
        return [f"  {said}: all blocks obey it"]
    return [f"  {said}:", *(textwrap.indent(f"{name}: {why}", "    ") for name, why in found.broken.items())]


def to_json(report: Report) -> dict[str, Any]:
    """The report as dicts, lists and strings."""
    return asdict(report)
