"""Figures as one JSON object per line in `results/<hardware>.jsonl`, and as a table.

A line names the commit it measured, so lines are appended only when the working tree is that commit.
"""

import datetime
import json
import os
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Line:
    """One measurement against one peer."""

    op: str
    frontend: str
    case: Mapping[str, object]
    us: float
    spread: float
    n: int
    nbytes: int
    flops: int
    of_roof: float | None
    roof: str | None
    peer: str
    peer_us: float
    ratio: float
    peak_nbytes: int | None
    error: Mapping[str, object]
    shares: Mapping[str, float] | None = None  # of a step's time by kind; only a profiled step has them


@dataclass(frozen=True)
class Run:
    """When, on what and of which commit; the same for all lines of one run."""

    date: str = field(default_factory=lambda: datetime.date.today().isoformat())
    commit: str | None = field(default_factory=lambda: clean_commit())
    hardware: str = field(default_factory=lambda: cpu_name())
    versions: Mapping[str, str] = field(default_factory=lambda: installed_versions())


def _git(*args: str) -> str | None:
    result = subprocess.run(["git", *args], cwd=RESULTS.parent, capture_output=True, text=True, check=False)
    return result.stdout.strip() if result.returncode == 0 else None


def clean_commit() -> str | None:
    """The commit of the working tree; None when anything but recorded figures differs from it."""
    if _git("status", "--porcelain", "--", ":/", ":(exclude,top)benchmarks/results") != "":
        return None
    return _git("rev-parse", "HEAD")


def cpu_name() -> str:
    """For example "2-core AMD EPYC"; the cores this process may use."""
    models = [s for s in Path("/proc/cpuinfo").read_text().splitlines() if s.startswith("model name")]
    model = models[0].split(":")[1].strip() if models else "CPU"
    return f"{len(os.sched_getaffinity(0))}-core {model}"


def installed_versions() -> dict[str, str]:
    versions = {}
    for package in ("torch", "jax", "triton"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


def record(run: Run, lines: Iterable[Line], file_name: str) -> str:
    """Append the lines to `results/<file_name>.jsonl`; returns what was done, in words."""
    if run.commit is None:
        return "not recorded: the working tree differs from its commit (or is no git checkout); commit first"
    path = RESULTS / f"{file_name}.jsonl"
    path.parent.mkdir(exist_ok=True)
    text = "".join(json.dumps(_without_empty_shares({**asdict(run), **asdict(line)})) + "\n" for line in lines)
    with path.open("a") as file:
        file.write(text)
    return f"recorded in {path.relative_to(RESULTS.parent.parent)}"


def _without_empty_shares(row: dict[str, object]) -> dict[str, object]:
    return {key: value for key, value in row.items() if key != "shares" or value is not None}


def newest(file_name: str) -> list[dict[str, Any]]:
    """The recorded lines of the last commit in the file."""
    rows = [json.loads(text) for text in (RESULTS / f"{file_name}.jsonl").read_text().splitlines()]
    return [row for row in rows if row["commit"] == rows[-1]["commit"]]


def table(lines: Iterable[Line]) -> str:
    """Both sides of every comparison, one row each."""
    rows = [("op", "frontend", "case", "us", "spread", "GB/s", "of roof", "peer", "peer us", "ratio", "error")]
    for line in lines:
        case = " ".join(f"{key}={value}" for key, value in line.case.items())
        rate = f"{line.nbytes / line.us / 1e3:.1f}" if line.nbytes else ""
        roof = f"{line.of_roof:.0%} {line.roof}" if line.of_roof is not None else ""
        error = " ".join(str(value) for value in line.error.values())
        rows.append((line.op, line.frontend, case, f"{line.us:.1f}", f"{line.spread:.0%}", rate, roof,
                     line.peer, f"{line.peer_us:.1f}", f"{line.ratio:.2f}x", error))  # fmt: skip
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
