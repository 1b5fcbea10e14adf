"""`python -m mxep.doctor`: versions, devices, what each op runs as here, and what is missing.

    this process    packages, the C++ extension
    child processes mxep.torch_frontend and mxep.jax_frontend, one each, since either framework may be missing or broken

Exits with 1 if a package of the wrong version is installed, an installed frontend fails, or an op runs nowhere.
Packages newer than the tested versions are warnings. The output is meant for bug reports too: it contains no names of
files or users.
"""

import json
import os
import platform
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from mxep import __version__

FRONTENDS = {"torch": "PyTorch", "jax": "JAX"}
OPTIONAL = {
    "triton": "ops on a GPU; a CPU needs none",
    "jax-triton": "Triton kernels in JAX on a GPU",
    "flax": "mxep.jax_frontend.integrations.nnx",
    "transformers": "mxep.torch_frontend.integrations.transformers",
    "accelerate": "the Trainer of transformers",
    "torchtitan": "mxep.torch_frontend.integrations.torchtitan",
    "safetensors": "checkpoints of the training examples",
}
"""Package -> what needs it."""
TESTED = {
    "numpy": "2.3, 2.5",
    "ml_dtypes": "0.6",
    "triton": "3.6",
    "torch": "2.11 to 2.13",
    "jax": "0.10.2, 0.11.2",
    "jaxlib": "0.10.2, 0.11.2",
    "jax-triton": "0.3.1",
    "flax": "0.12.8",
    "transformers": "5.17 to 5.23",
    "accelerate": "1.15.0",
    "torchtitan": "0.3.0",
    "safetensors": "0.8.0",
}
"""Package -> the releases that tests ran with, the last of which is the ceiling: above it the report warns."""
TIMEOUT_S = 300
ROWS_TO_GAIN, MEASURED_ON = 250, "H200, commit a9c8076"
"""Rows per expert from which a layer in recipe mxfp8 is faster than in recipe bf16, weights quantized in every step, in
a CUDA graph: by a line through measured layers (docs/results/performance.md)."""
COMPUTED_ROWS = {"under FSDP2": 320, "cached_weights() for two microbatches": 100, "for four": 30}
"""The same where a step moves more or fewer bytes per weight, at the rate of copies: not measured."""


def torch_facts() -> dict[str, Any]:
    """Devices of PyTorch and the implementation of every op on each."""
    import torch
    from mxep.torch_frontend import capabilities

    devices = {"cpu": "cpu"}
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        major, minor = torch.cuda.get_device_capability(index)
        name = f"cuda:{index} {torch.cuda.get_device_name(index)}, sm_{major}{minor}"
        devices[name] = f"cuda:{index}"
    facts: dict[str, Any] = {"devices": {name: capabilities(device) for name, device in devices.items()}}
    facts["note"] = ""
    if len(devices) == 1:
        built = torch.version.cuda or torch.version.hip
        facts["note"] = f"torch {torch.__version__} is built for {built or 'CPUs alone'} and sees no GPU{_driver()}"
    return facts


def jax_facts() -> dict[str, Any]:
    """Devices of JAX and the implementation of every op on its platforms."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax
    from mxep.jax_frontend import capabilities

    facts: dict[str, Any] = {"devices": {"cpu": capabilities("cpu")}, "note": ""}
    if jax.default_backend() == "gpu":
        kinds = sorted({device.device_kind for device in jax.devices()})
        facts["devices"][f"cuda x {len(jax.devices())} {', '.join(kinds)}"] = capabilities("cuda")
    elif jax.default_backend() == "cpu":
        facts["note"] = f"jax sees no GPU{_driver()}"
    else:
        facts["note"] = f"jax runs on {jax.default_backend()} by default, where mxep has no kernels"
    return facts


def _driver() -> str:
    found = Path("/proc/driver/nvidia/version").exists()
    return ", though the machine has an NVIDIA driver: install its build for CUDA" if found else ""


def main() -> int:
    """Print the report; returns the exit status."""
    problems: list[str] = []
    warnings: list[str] = []
    print(f"mxep {__version__}, Python {platform.python_version()}, {platform.system()} "
          f"{platform.machine()}, {os.cpu_count()} CPUs\n")  # fmt: skip
    _packages(problems, warnings)
    _extension(problems)
    works = [_frontend(name, problems) for name in FRONTENDS if _version(name)]
    for name, title in FRONTENDS.items():
        if not _version(name):
            print(f"\n{title}: not installed; `pip install 'mxep[{name}]'`")
    if not any(works):
        problems.append("no frontend works: install PyTorch or JAX")
    if warnings:
        _list("Not tested:", warnings)
    if problems:
        _list("Wrong:", problems)
    else:
        print("\nNothing is wrong.")
    return int(bool(problems))


def _list(title: str, lines: list[str]) -> None:
    print(f"\n{title}")
    for line in lines:
        print(textwrap.fill(f"- {line}", 110, subsequent_indent="  "))


def _version(package: str) -> str:
    """ "" if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _packages(problems: list[str], warnings: list[str]) -> None:
    asked = requirements(metadata.requires("mxep") or [])
    print(f"  {'':14}{'here':16}{'asked for':16}tested with")
    for package, tested in TESTED.items():
        version, spec = _version(package), asked.get(package, "")
        purpose = f"  for {OPTIONAL[package]}" if package in OPTIONAL and not version else ""
        print(f"  {package:14}{version or 'missing':16}{spec:16}{tested}{purpose}")
        if version and not satisfies(version, spec):
            problems.append(f"{package} {version}: mxep asks for {spec}; `pip install '{package}{spec}'`")
        elif version and is_above(version, ceiling := re.split(" to |, ", tested)[-1]):
            warnings.append(f"{package} {version}: tests ran with releases up to {ceiling}; "
                            f"if it fails, `pip install '{package}=={ceiling}.*'`")  # fmt: skip
        if not version and package in ("numpy", "ml_dtypes"):
            problems.append(f"{package} is missing; `pip install '{package}{spec}'`")


def requirements(lines: Iterable[str]) -> dict[str, str]:
    """Package -> its bounds: the first that an extra gives, since another extra may name the package without any.

    >>> requirements(['jax<0.12,>=0.10.2; extra == "jax"', 'jax[cuda13]; extra == "jax-cuda"'])
    {'jax': '<0.12,>=0.10.2'}
    """
    found: dict[str, str] = {}
    for line in lines:
        name, spec = re.match(r"([\w.-]+)(?:\[.*?\])?\s*([^;]*)", line).groups()  # type: ignore[union-attr]
        found[name] = found.get(name) or spec.strip()
    return found


def satisfies(version: str, spec: str) -> bool:
    """Whether a version is within bounds of >=, < and ==, by its numbers alone.

    >>> satisfies("2.13.0+cpu", ">=2.11,<2.14"), satisfies("2.14.1", "<2.14,>=2.11"), satisfies("0.3.1", "==0.3.0")
    (True, False, False)
    """
    number = _numbers(version)
    compare = {">=": number.__ge__, "<": number.__lt__, "==": number.__eq__}
    return all(compare[operator](_numbers(bound)) for operator, bound in re.findall(r"(>=|<|==)\s*([\w.]+)", spec))


def is_above(version: str, ceiling: str) -> bool:
    """Whether a release is newer than a tested one, as far as the tested one is given.

    >>> is_above("3.6.1", "3.6"), is_above("3.7", "3.6"), is_above("3.9.0", "3.10")
    (False, True, False)
    """
    number = _numbers(ceiling)
    return _numbers(version)[: len(number)] > number


def _numbers(version: str) -> list[int]:
    return [int(n) for n in re.match(r"[\d.]*\d", version).group().split(".")]  # type: ignore[union-attr]


def _extension(problems: list[str]) -> None:
    try:
        from mxep import cpp_bindings
    except ImportError as error:
        problems.append(str(error))
        return
    print(f"\nC++ kernels: {cpp_bindings.num_threads()} threads")
    if cpp_bindings.cuda_archs:
        archs = ", ".join(f"sm_{major}{minor}a" for major, minor in cpp_bindings.cuda_archs)
        print(f"CUDA C++ kernels: {len(cpp_bindings.CUDA_OPS)} ops for {archs}")
        computed = ", ".join(f"{case} {rows}" for case, rows in COMPUTED_ROWS.items())
        print(f"On Hopper recipe mxfp8 is faster than bf16 from about {ROWS_TO_GAIN} rows per expert, which are "
              "tokens * top_k / num_experts.")  # fmt: skip
        print(f"  measured: {MEASURED_ON}, weights quantized in every step, in a CUDA graph; computed: {computed}")
    else:
        print("CUDA C++ kernels: none in this build; on a GPU Triton runs all ops. `make install-gpu` adds them.")


def _frontend(name: str, problems: list[str]) -> bool:
    """Print the devices of a frontend; False if it does not work."""
    title = FRONTENDS[name]
    program = f"import json; from mxep import doctor; print(json.dumps(doctor.{name}_facts()))"
    try:
        ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        problems.append(f"{title}: no answer within {TIMEOUT_S} s of importing it and asking for its devices")
        return False
    if ran.returncode:
        last = (ran.stderr.strip().splitlines() or [f"exit status {ran.returncode}"])[-1]
        print(f"\n{title}: does not work: {last}")
        problems.append(f"{title}: {last}")
        return False
    facts = json.loads(ran.stdout.splitlines()[-1])
    for device, ops in facts["devices"].items():
        print(f"\n{title} on {device}")
        for line in of_device(ops):
            print(textwrap.fill(line, 118, initial_indent="  ", subsequent_indent="    "))
        if nowhere := [op for op, (uses, _) in ops.items() if not uses]:
            count = f"{len(nowhere)} of {len(ops)}"
            problems.append(f"{title} on {device}: {count} ops do not run, {nowhere[0]} among them")
    if facts["note"]:
        print(f"  {facts['note']}.")
    return True


def of_device(ops: Mapping[str, tuple[str, Mapping[str, str]]]) -> list[str]:
    """A line for each implementation, with its ops, from op -> (uses, absent).

    >>> of_device({"swiglu": ("cpp", {}), "combine": ("cpp", {}), "route": ("", {"triton": "allowed: sm_90"})})
    ['2 ops in C++: combine, swiglu', '1 op does not run (triton: allowed: sm_90): route']
    """
    groups: dict[str, list[str]] = {}
    for op, (uses, absent) in ops.items():
        if not uses:
            how = f"does not run ({'; '.join(f'{name}: {reason}' for name, reason in absent.items())})"
        elif all(part in ops for part in uses.split(", ")):
            how = "composed of other ops"
        else:
            how = re.sub(r"^(cpp|cuda|triton)", lambda m: f"in {NAMES[m[0]]}", uses)
            how = how if how.startswith("in ") else f"by {how}"
        groups.setdefault(how, []).append(op)
    return [
        f"{len(names)} {'op' if len(names) == 1 else 'ops'} {how}: {', '.join(sorted(names))}"
        for how, names in groups.items()
    ]


NAMES = {"cpp": "C++", "cuda": "CUDA C++", "triton": "Triton"}

if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends the report without a traceback
    sys.exit(main())
