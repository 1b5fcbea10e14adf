"""The processes that compute entries: a few at a time, each of one source, or of a share of its cases.

A process has an environment in which threads, compilers and libraries make the same bytes in every run.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

from .records import Cases

ROOT = Path(__file__).resolve().parents[2]
RECORDS = {"cpu": ("cpu", "cpu_products"), "ptx": ("ptx",), "sass": ("sass",), "gpu": ("gpu",)}
"""Part of the command -> the records that it makes."""


class Source(NamedTuple):
    """A module and the argument of its `cases`, and the records that they belong to. shares: processes that it may be
    divided among, at most."""

    module: str
    records: tuple[str, ...]
    shares: int = 1


OPS = ("cpu", "cpu_products")
SOURCES = (
    Source("ptx", ("ptx",), 8),
    Source("sass", ("sass",)),
    Source("layers_jax", ("cpu_products",), 4),
    Source("ranks_jax", ("cpu_products",), 4),
    Source("ops jax", OPS, 2),
    Source("ops torch", OPS),
    Source("ranks_torch", ("cpu_products",)),
    Source("layers_torch", ("cpu_products",)),
    Source("large", ("gpu",), 2),
    Source("ops jax", ("gpu",), 5),
    Source("ops torch", ("gpu",), 4),
    Source("layers_torch", ("gpu",)),
)
"""In the order in which they start: the longest first."""

ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_CBWR": "COMPATIBLE"}
"""Sums do not depend on the number of cores or on the address of an operand."""
EXACT = "--xla_allow_excess_precision=false"
"""XLA rounds to bf16 where the program does, wherever it cuts the program into fusions."""
ON_A_CPU = {
    **ONE_THREAD,
    "CUDA_VISIBLE_DEVICES": "",
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": f"{EXACT} --xla_force_host_platform_device_count=2 --xla_cpu_multi_thread_eigen=false "
    "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1",
}
ON_A_GPU = {
    **ONE_THREAD,
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "XLA_FLAGS": f"{EXACT} --xla_gpu_autotune_level=0",
}
"""XLA chooses its matrix products without timing them: another run could choose others."""


class Share(NamedTuple):
    """Every `of`-th case of a source, from the case `number`."""

    source: Source
    number: int
    of: int

    def __str__(self) -> str:
        part = f", {self.number + 1} of {self.of}" if self.of > 1 else ""
        return f"{self.source.records[0]}: {self.source.module}{part}"


class Ran(NamedTuple):
    """cases: by record. failure: the output of a process that failed."""

    cases: dict[str, Cases]
    failure: str
    seconds: float


def run(names: Collection[str], words: list[str], jobs: int) -> tuple[dict[str, Cases], list[str]]:
    """The entries of the records named, of the cases whose names have one of the words, or of all without words; and
    failures. Prints how long each source took."""
    sources = [source for source in SOURCES if not set(names).isdisjoint(source.records)]
    shares = [Share(source, i, of) for source in sources for of in (min(source.shares, jobs),) for i in range(of)]
    found: dict[str, Cases] = {name: {} for name in names}
    failures = []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        outs = [Path(folder) / str(i) for i in range(len(shares))]
        for share, ran in zip(shares, pool.map(partial(_run_one, words), shares, outs), strict=True):
            print(f"{ran.seconds:5.0f} s  {share}: {sum(map(len, ran.cases.values()))} cases", flush=True)
            for name in found.keys() & ran.cases.keys():
                found[name].update(ran.cases[name])
            failures += [f"{share}: {ran.failure}"] if ran.failure else []
    return found, failures


def _run_one(words: list[str], share: Share, out: Path) -> Ran:
    begin, source = time.monotonic(), share.source
    command = [sys.executable, "-m", "tests.frozen.worker", source.module, str(share.number), str(share.of), str(out)]
    one_gpu = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]}
    environment = {**os.environ, **(one_gpu | ON_A_GPU if "gpu" in source.records else ON_A_CPU)}
    environment.pop("TRITON_INTERPRET", None)
    ran = subprocess.run([*command, *words], cwd=ROOT, env=environment, capture_output=True, text=True)
    failed = ran.returncode != 0 or not out.exists()
    cases = json.loads(out.read_text()) if out.exists() else {}
    return Ran(cases, (ran.stderr[-3000:] or f"exit code {ran.returncode}") if failed else "", time.monotonic() - begin)
