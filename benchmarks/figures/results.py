"""Figures as one JSON object per line in `results/<hardware>.jsonl`, and as rows of the terminal's table.

A line names the commit that it measured. It is appended only if the working tree equals a commit; without git,
`--commit` names the commit.
"""

import datetime
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from .bars import bar

RESULTS = Path(__file__).parents[1] / "results"
OPTIONAL = ("peer_of_roof", "peer_roof", "peer_nbytes", "peer_peak_nbytes", "joules", "peer_joules", "parts_us",
            "peer_parts_us", "experts_ratio", "dense_ratio", "ceiling", "largest_group")  # fmt: skip


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
    peer_of_roof: float | None = None  # the peer's share of its own roof, peer_roof; of grouped products only
    peer_roof: str | None = None
    peer_nbytes: int | None = None  # where the peer moves other bytes: of gathers of experts
    peer_peak_nbytes: int | None = None  # of layers and of expert parallelism
    joules: float | None = None  # of a step of back-to-back steps; None without NVML's energy counter
    peer_joules: float | None = None
    parts_us: Mapping[str, float] | None = None  # of an optimizer step of a model: its kernels by part, and idle
    peer_parts_us: Mapping[str, float] | None = None
    experts_ratio: float | None = None  # of a model: the peer's time of the experts alone, divided by ours
    ceiling: float | None = None  # the ratio that the peer's parts and these ratios allow
    largest_group: float | None = None  # rows of the largest group of the first layer, relative to the mean
    dense_ratio: float | None = None  # of a model: as experts_ratio, of the dense layers; None: bf16 in every candidate


@dataclass(frozen=True)
class Run:
    """Date, hardware, commit and versions; the same for all lines of a run. commit None: no commit can be named."""

    hardware: str
    commit: str | None
    versions: Mapping[str, str] = field(default_factory=lambda: installed_versions())
    date: str = field(default_factory=lambda: datetime.date.today().isoformat())


def _output(*command: str) -> str | None:
    """Standard output of a program; None if it is not installed or fails."""
    if shutil.which(command[0]) is None:
        return None
    result = subprocess.run(command, cwd=RESULTS.parent, capture_output=True, text=True, check=False)
    return result.stdout.strip() if result.returncode == 0 else None


def clean_commit() -> str | None:
    """The commit of the working tree; None if anything but recorded figures differs from it."""
    if _output("git", "status", "--porcelain", "--", ":/", ":(exclude,top)benchmarks/results") != "":
        return None
    return _output("git", "rev-parse", "HEAD")


def cpu_name() -> str:
    """For example "2-core AMD EPYC", with the cores that this process may use."""
    models = [s for s in Path("/proc/cpuinfo").read_text().splitlines() if s.startswith("model name")]
    model = models[0].split(":")[1].strip() if models else "CPU"
    return f"{len(os.sched_getaffinity(0))}-core {model}"


def gpu_name() -> str | None:
    """For example "NVIDIA H200"; None without a GPU or without nvidia-smi."""
    return _smi("name")


def file_name(gpu: str | None) -> str:
    """Name of the file for the figures of this hardware.

    >>> [file_name(gpu) for gpu in ("NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB", None)]
    ['h200', 'h100', 'a100', 'cpu']
    """
    model = re.search(r"\b[A-Z]+\d+", gpu or "CPU")
    return model[0].lower() if model else (gpu or "CPU").split()[-1].lower()


def _smi(query: str) -> str | None:
    """A property of the first GPU."""
    answer = _output("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader")
    return answer.splitlines()[0] if answer else None


def installed_versions() -> dict[str, str]:
    """Versions of the packages that the figures depend on, of nvcc and of the GPU's driver."""
    versions = {}
    for package in ("torch", "jax", "triton"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    driver, compiler = _smi("driver_version"), re.search(r"release ([\d.]+)", _output("nvcc", "--version") or "")
    return versions | ({"cuda": compiler[1]} if driver and compiler else {}) | ({"driver": driver} if driver else {})


def record(run: Run, line: Line, path: Path) -> None:
    """Append the line; the run's commit is known."""
    with path.open("a") as file:
        row = {**asdict(run), **asdict(line)}
        file.write(json.dumps({k: v for k, v in row.items() if k not in OPTIONAL or v is not None}) + "\n")


def newest(name: str, wanted: Callable[[str], bool] = lambda op: True) -> list[dict[str, Any]]:
    """The lines of each wanted op and hardware at the last commit measured; of a model, which takes minutes, at the
    last of this model and frontend, and of an exchange (`how`) at the last of its case. Of two lines about the same
    case the later one counts.

    [] without a file or without such lines.
    """
    path = RESULTS / f"{name}.jsonl"
    rows = [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []
    rows = [row for row in rows if wanted(row["op"])]

    def measured(row: dict[str, Any]) -> tuple[Any, ...]:
        case = row["case"]
        model = (case["model"], row["frontend"]) if "model" in case else ()
        exchange = (str(case), row["frontend"]) if "how" in case else ()
        return row["op"], row["hardware"], model, exchange

    last = {measured(row): row["commit"] for row in rows}
    of_commit = [row for row in rows if row["commit"] == last[measured(row)]]
    return list({(r["op"], r["hardware"], r["frontend"], str(r["case"]), r["peer"]): r for r in of_commit}.values())


HEADER = ("op", "frontend", "case", "us", "spread", "rate", "of roof", "peer", "peer us", "its roof", "ratio",
          "error", "bar")  # fmt: skip
WIDTHS = (19, 8, 72, 9, 6, 11, 11, 23, 9, 11, 7, 24, 0)


def rate(flops: int, nbytes: int, us: float) -> str:
    """TF/s of a product, GB/s of any other op."""
    return f"{flops / us / 1e6:.4g} TF/s" if flops else f"{nbytes / us / 1e3:.1f} GB/s" if nbytes else ""


def cells(line: Line) -> tuple[str, ...]:
    """The row of one comparison."""
    case = " ".join(f"{key}={value}" for key, value in line.case.items())
    roof, peer_roof = (
        f"{share:.0%} {name}" if share is not None else ""
        for share, name in ((line.of_roof, line.roof), (line.peer_of_roof, line.peer_roof))
    )
    error = " ".join(str(value) for value in line.error.values())
    held_to = str(bar(asdict(line)) or "")
    return (line.op, line.frontend, case, f"{line.us:.1f}", f"{line.spread:.0%}",
            rate(line.flops, line.nbytes, line.us), roof, line.peer, f"{line.peer_us:.1f}", peer_roof,
            f"{line.ratio:.2f}x", error, held_to)  # fmt: skip


def row(texts: Iterable[str]) -> str:
    return "  ".join(text.ljust(width) for text, width in zip(texts, WIDTHS, strict=True)).rstrip()
