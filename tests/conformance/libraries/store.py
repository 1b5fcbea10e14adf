"""Reports of other libraries, and the tables of docs/conformance.md that they fill.

    python -m tests.conformance.libraries.store onnx jax_nn     runs these, writes docs/conformance/*.json, the tables
    python -m tests.conformance.libraries.store                 writes the tables from the stored reports

A stored report has the versions of its packages, the rules that were found, and for each input of quantize_row a digest
of the bytes: libraries agree on an input where their digests do.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

from mxep.core_kernels.cases import MODES
from mxep.core_kernels.conformance.backend import load
from mxep.core_kernels.conformance.cases import CONFORMANCE
from mxep.core_kernels.conformance.check import Definition
from mxep.core_kernels.conformance.report import Report
from mxep.core_kernels.conformance.runner import digest, run
from mxep.core_kernels.quantize.cases import MATRICES

DOCS = Path(__file__).parents[3] / "docs"
PAGE, STORED = DOCS / "conformance.md", DOCS / "conformance"
NAMES = {
    "torchao": "torchao", "onnx": "ONNX", "gfloat": "gfloat", "jax_nn": "jax.nn", "qwix": "qwix",
    "microxcaling": "microxcaling*", "transformer_engine": "Transformer Engine*", "deep_gemm": "DeepGEMM*",
}  # fmt: skip
"""Module -> name in the tables; * marks transcribed formulas."""
DEFINED = {"rceil": "R", "rceil_satfinite": "Rs", "floor": "F", "floor_satfinite": "Fs"}
"""Mode of the definition -> its letter in the table of inputs. Where modes agree the first has the cell."""
OTHERS = "abcdefghijkl"
OP = "quantize_row"


def reduced(report: Report) -> dict[str, Any]:
    """The part of a report that is stored."""
    inputs: dict[str, dict[str, str]] = {}
    for case, value in report.ops[OP].digests.items():
        _, name, mode = case.split("-")
        inputs.setdefault(mode.split("_")[0], {})[name] = value
    return {
        "versions": report.versions,
        "source": report.source,
        "ops": {
            op: {"agree": len(ran.agree), "differ": len(ran.differ), "skipped": len(ran.skipped)}
            for op, ran in report.ops.items()
        },
        "rules": {
            found.rounding.lower(): {"satfinite": found.satfinite, "verdicts": found.verdicts, "broken": found.broken}
            for key, found in report.rules.items()
            if key.split(",")[0] == OP
        },
        "inputs": inputs,
    }


def run_library(name: str) -> dict[str, Any]:
    """The stored form of a new run."""
    return reduced(run(load(f"{__package__}.{name}")))


def of_definition() -> dict[str, dict[str, str]]:
    """Letter -> input -> digest of the definition's bytes."""
    return {
        DEFINED[mode]: {name: digest(Definition(CONFORMANCE[f"{OP}-{name}-{mode}"]).want) for name in MATRICES}
        for mode in MODES
    }


def columns() -> dict[str, tuple[dict[str, Any], dict[str, str]]]:
    """Title -> the rules and the digests of a library in one rounding."""
    found = {}
    for name, title in NAMES.items():
        stored = json.loads((STORED / f"{name}.json").read_text())
        for rounding, digests in stored["inputs"].items():
            found[title + f" {rounding.upper()}" * (len(stored["inputs"]) > 1)] = stored["rules"][rounding], digests
    return found


def rules_table() -> str:
    """Which rules each library obeys."""
    aspects = ("scale", "small blocks", "zeros", "elements at byte 0", "overflow", "infinity", "NaN")
    lines = [f"| | {' | '.join(aspects)} |", "| --- |" + " --- |" * len(aspects)]
    for title, (rules, _) in columns().items():
        cells = []
        for aspect in aspects:
            verdict = rules["verdicts"][aspect]
            if verdict == "no rule of these":
                best = rules["broken"][aspect].splitlines()[1]
                rule, count, total = re.match(r"\s*(.*): (\d+) of (\d+) blocks", best).groups()  # type: ignore[union-attr]
                verdict = f"{rule}, {count} of {total} blocks"
            cells.append(verdict.split(" or ")[0] or "does not occur")
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def inputs_table() -> str:
    """Input by input: equal letters of a line are equal bytes."""
    found, defined = columns(), of_definition()
    lines = ["| input | " + " | ".join(found) + " |", "| --- |" + " --- |" * len(found)]
    for name in MATRICES:
        letters: dict[str, str] = {}
        for letter, digests in defined.items():
            letters.setdefault(digests[name], letter)
        others = iter(OTHERS)
        cells = []
        for _, digests in found.values():
            value = digests.get(name)
            if value is not None and value not in letters:
                letters[value] = next(others)
            cells.append(letters[value] if value is not None else "-")
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def pairs_table() -> str:
    """The number of inputs with equal bytes of each pair."""
    found = {title: digests for title, (_, digests) in columns().items()}
    sides = of_definition() | {str(number): digests for number, digests in enumerate(found.values(), 1)}
    lines = ["| | " + " | ".join(sides) + " |", "| --- |" + " --- |" * len(sides)]
    for number, (title, digests) in enumerate(found.items(), 1):
        cells = [str(sum(digests[name] == other.get(name) for name in digests)) for other in sides.values()]
        lines.append(f"| {number} {title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def versions_table() -> str:
    """Versions of the libraries, and sources of transcribed formulas."""
    lines = ["| | report | versions, or the source of the formula |", "| --- | --- | --- |"]
    for name, title in NAMES.items():
        stored = json.loads((STORED / f"{name}.json").read_text())
        versions = ", ".join(f"{package} {version}" for package, version in stored["versions"].items())
        lines.append(f"| {title} | [json](conformance/{name}.json) | {stored['source'] or versions} |")
    return "\n".join(lines)


TABLES = {"rules": rules_table, "inputs": inputs_table, "pairs": pairs_table, "versions": versions_table}


def with_tables(page: str) -> str:
    """The page with its generated tables."""
    for name, table in TABLES.items():
        start, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        assert page.count(start) == page.count(end) == 1, name
        before, _, rest = page.partition(start)
        page = before + start + table() + "\n" + end + rest.partition(end)[2]
    return page


def main(names: list[str]) -> None:
    STORED.mkdir(exist_ok=True)
    for name in names:
        (STORED / f"{name}.json").write_text(json.dumps(run_library(name), indent=1) + "\n")
    PAGE.write_text(with_tables(PAGE.read_text()))


if __name__ == "__main__":
    main(sys.argv[1:])
