"""docs/getting-started: the messages of troubleshooting.md are in the sources; support.md has the facts of the code.

`op: argument: got ...; allowed: x` --pieces between names, in the order of `fail`--> ["got", "allowed: x"] in one file
"""

import re
from functools import cache
from pathlib import Path

import pytest
from mxep import doctor
from mxep.core_kernels.dispatch import GPUS

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "getting-started"
SOURCES = ("torch_frontend", "jax_frontend", "core_kernels", "cpp_bindings", "cmake", "doctor.py")
MESSAGE = re.compile(r"^\| `([^`]+|[^`]*`[^|]*`[^`]*)` \|", re.MULTILINE)


def messages() -> list[str]:
    page, _, _ = (PAGES / "troubleshooting.md").read_text().partition("## Messages of PyTorch")
    return MESSAGE.findall(page)


def pieces(message: str) -> list[str]:
    """The literal parts of a message: `fail` joins its arguments with ": ", ": got " and "; "."""
    parts = re.split(r"\.\.\.|: got |; (?=allowed: |or |run )|(?<!allowed): (?!got )", message)
    return [part for piece in parts if len(part := piece.strip(" ,;")) > 2]


@cache
def sources() -> tuple[str, ...]:
    """Text of the sources; literals of adjacent lines are joined, as Python and CMake join them."""
    paths = [
        path for name in SOURCES for path in ([ROOT / name] if "." in name else sorted((ROOT / name).rglob("*.*")))
    ]
    texts = [path.read_text() for path in paths if path.suffix in (".py", ".cmake", ".cc", ".cu")]
    texts = [re.sub(r"\"\s*\n\s*f?\"", "", text).replace("{BLOCK}", "32") for text in texts]
    return tuple(text.replace("{}.{} to {}.{}", "5.17 to 5.23") for text in texts)


def is_in_sources(message: str) -> bool:
    return any(all(piece in text for piece in pieces(message)) for text in sources())


@pytest.mark.parametrize("message", messages())
def test_a_quoted_message_is_in_the_sources(message: str) -> None:
    assert pieces(message)
    assert is_in_sources(message), pieces(message)


def test_a_wrong_message_is_found() -> None:
    found = pieces("PeerMemory: rows: got groups of ... rows; allowed: one host")
    assert found == ["PeerMemory", "rows", "groups of", "rows", "allowed: one host"]
    assert len(messages()) > 30
    assert not is_in_sources("PeerMemory: rows: got groups of ... columns with padding on rank ...")


def test_the_support_matrix_has_every_gpu_and_the_tested_releases() -> None:
    page = (PAGES / "support.md").read_text()
    assert not [arch.name for arch in GPUS.values() if f"`{arch.name}`" not in page]
    rows = dict(re.findall(r"^\| ([\w, .-]+?) \| (.*) \|$", page, re.MULTILINE))
    for package in ("torch", "triton", "jax-triton", "numpy", "ml_dtypes"):
        releases = re.findall(r"\d+\.\d+(?:\.\d+)?", doctor.TESTED[package])
        assert not [release for release in releases if release not in rows[package]], package
    assert all(release in rows["jax, jaxlib"] for release in re.findall(r"[\d.]+", doctor.TESTED["jax"]))
