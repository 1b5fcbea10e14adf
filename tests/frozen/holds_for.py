"""The conditions of a record: the versions and the machine that its bytes depend on."""

import hashlib
import re
from importlib import metadata
from pathlib import Path

from mxep.cpp_bindings import _ops


def holds_for(record: str) -> str:
    """
    >>> holds_for("cpu")
    'every machine'
    """
    return {"cpu": _every_machine, "cpu_products": _cpu_products, "gpu": _gpu, "sass": _nvcc, "ptx": _triton}[record]()


def _every_machine() -> str:
    return "every machine"


def _cpu_products() -> str:
    """Libraries of matrix products choose their code by the instructions and the caches of a CPU."""
    cpuinfo = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    facts = dict(re.findall(r"^([\w ]+?)\s*: (.*)$", cpuinfo, re.MULTILINE))
    caches = sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"))
    which = [facts.get(name, "") for name in ("vendor_id", "cpu family", "model", "flags")]
    which += [path.read_text() for path in caches]
    digits = hashlib.sha256("\n".join(which).encode()).hexdigest()[:8]
    return f"{_versions('torch', 'jax')}, {facts.get('model name', 'CPU')} {digits}"


def _gpu() -> str:
    import torch

    device = torch.cuda.get_device_properties(0)
    size = f"sm_{device.major}{device.minor} of {device.multi_processor_count} multiprocessors"
    return f"{_versions('torch', 'jax', 'triton')}, {_nvcc()}, {size}"


def _nvcc() -> str:
    """Of the extension, which names its compiler."""
    found = re.findall(rb"Cuda compilation tools, release [\d.]+, V([\d.]+)", Path(_ops.__file__).read_bytes())
    return f"nvcc {', '.join(sorted({version.decode() for version in found})) or 'of none'}"


def _triton() -> str:
    return _versions("triton")


def _versions(*packages: str) -> str:
    return ", ".join(f"{package} {metadata.version(package)}" for package in packages)
