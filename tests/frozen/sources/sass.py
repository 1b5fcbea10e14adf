"""The CUDA kernels of the extension: hashes of their instructions and of what they occupy, by kernel.

_ops.so --cuobjdump--> Function : name          instructions as the device reads them, 16 bytes each; jumps are
                         /*0000*/ LDC ... ;     relative. Names, addresses and the text of the disassembler stay
                                  /* 0x... */   out of the hash.
"""

import re
import shutil
import subprocess
from collections import Counter
from functools import partial
from pathlib import Path

import triton
from mxep.cpp_bindings import _ops

from ..hashes import digits_of_text
from ..records import Case, Cases, Entry

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
OPTIONS = ("-sass", "--dump-resource-usage")


def cases() -> dict[str, Case]:
    found = entries(*(dump(option, Path(_ops.__file__)) for option in OPTIONS))
    if not found:
        raise SystemExit("sass: the extension has no CUDA kernels; build it where nvcc is on the PATH")
    return {name: Case("sass", partial(dict, entry)) for name, entry in found.items()}


def dump(option: str, module: Path) -> str:
    return subprocess.run([CUOBJDUMP, option, module], capture_output=True, text=True, check=True).stdout


def entries(code: str, resources: str) -> Cases:
    """By target and name. code, resources: what cuobjdump prints with each of OPTIONS."""
    usage = {kernel: re.findall(r"[A-Z]+(?:\[\d+\])?:\d+", text) for kernel, text in kernels(resources)}
    found, seen, codes = {}, Counter[str](), kernels(code)
    names = demangled([symbol for (_, symbol), _ in codes])
    for ((target, symbol), text), name in zip(codes, names, strict=True):
        title = f"{target} {name}"
        seen[title] += 1
        title += f" #{seen[title]}" if seen[title] > 1 else ""
        found[title] = entry(target, text, usage[target, symbol])
    return found


def kernels(text: str) -> list[tuple[tuple[str, str], str]]:
    """((target, symbol), cuobjdump's text) of each kernel."""
    found = []
    for part in re.split(r"\n(?=arch = )", text)[1:]:
        for kernel in re.split(r"\n\s*Function\s*:?\s*", part)[1:]:
            symbol = re.match(r"[\w$.]+", kernel)
            assert symbol
            found.append(((part.split()[2], symbol[0]), kernel))
    return found


def entry(target: str, text: str, usage: list[str]) -> Entry:
    """text: of the disassembler, with the two words of each instruction's encoding."""
    words = re.findall(r"/\* (0x[0-9a-f]{16}) \*/", text)
    assert words, "cuobjdump printed no instructions"
    return {
        "instructions": digits_of_text("\n".join([target, *words])),
        "resources": digits_of_text(" ".join(sorted(usage))),
    }


def demangled(symbols: list[str]) -> list[str]:
    """Names for a reader, without parameters; the symbols themselves where there is no c++filt."""
    filt = shutil.which("c++filt")
    if filt is None or not symbols:
        return symbols
    return subprocess.run([filt, "-p"], input="\n".join(symbols), capture_output=True, text=True).stdout.split("\n")
