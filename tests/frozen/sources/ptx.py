"""The Triton kernels: hashes of their PTX for Hopper and Blackwell, in the launches of tests/kernels.

Names of kernels, places in the source and debug sections stay out of the hash.
"""

import re
from functools import partial
from typing import Any

from ...kernels.cross_compile import test_cross_compile as cross_compile
from ..hashes import digits_of_text
from ..records import Case, Entry


def cases() -> dict[str, Case]:
    return {
        f"{arch} {name}": Case("ptx", partial(entry, name, arch))
        for arch in cross_compile.ARCHS
        for name in cross_compile.CASES
    }


def entry(name: str, arch: str) -> Entry:
    kernel: Any = cross_compile.compiled(name, arch)
    return {"ptx": digits_of_text(stripped(kernel.asm["ptx"])), "shared": str(kernel.metadata.shared)}


def stripped(ptx: str) -> str:
    """The instructions, with one name for every kernel.

    >>> stripped(".entry f(.param .b32 f_param_0)\\n{\\n  .loc 1 2 3 // f.py:2\\n$L__tmp0:\\n  ret; // end\\n}")
    '.entry kernel(.param .b32 kernel_param_0)\\n{\\nret;\\n}'
    """
    ptx = re.sub(r"\.section\s+\.debug_\w+\s*\{.*?\}", "", ptx, flags=re.DOTALL)
    for name in re.findall(r"\.entry (\w+)", ptx):
        ptx = re.sub(rf"\b{name}(?=\b|_param_)", "kernel", ptx)
    lines = (line.partition("//")[0].strip() for line in ptx.splitlines())
    return "\n".join(line for line in lines if line and not re.match(r"\.(loc|file)\b|\$L__(tmp|func)\w*:", line))
