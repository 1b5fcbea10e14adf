"""The version is in pyproject.toml; a release repeats it for readers. The files of a release are small."""

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from mxep import __version__

ROOT = Path(__file__).parents[2]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def test_the_version_is_the_same_everywhere() -> None:
    """`mxep.__version__` is read from the installed metadata."""
    assert __version__ == VERSION
    citation = dict(re.findall(r"^([\w-]+): (.+)$", (ROOT / "CITATION.cff").read_text(), re.M))
    assert citation["version"] == VERSION
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", citation["date-released"])
    newest = re.search(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert newest
    assert re.match(rf"{re.escape(VERSION)}\b", newest[1])


def sizes(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, ROOT / "tests/install/sizes.py", folder], capture_output=True, text=True)


def test_the_files_of_a_release_are_small(tmp_path: Path) -> None:
    ran = sizes(tmp_path)
    assert (ran.returncode, ran.stdout) == (1, "")
    assert "no wheel and no sdist" in ran.stderr
    (tmp_path / "cpu").mkdir()
    sdist = tmp_path / f"mxep-{VERSION}.tar.gz"
    for file in (tmp_path / f"mxep-{VERSION}-x.whl", tmp_path / f"cpu/mxep-{VERSION}-x.whl", sdist):
        file.write_bytes(bytes(1_200_000))
    ran = sizes(tmp_path)
    assert (ran.returncode, ran.stderr, ran.stdout.count("1,200,000 bytes  sha256 ")) == (0, "", 3)


@pytest.mark.parametrize(
    ("name", "nbytes", "reason"),
    [
        (f"mxep-{VERSION}-x.whl", 3_500_001, "3,500,001 bytes, allowed: 3,500,000"),
        (f"cpu/mxep-{VERSION}-x.whl", 1_200_001, "1,200,001 bytes, allowed: 1,200,000"),
        (f"mxep-{VERSION}.tar.gz", 2_500_001, "2,500,001 bytes, allowed: 2,500,000"),
        ("mxep-0.0.1-x.whl", 1, f"not of version {VERSION}; remove it"),
    ],
)
def test_a_large_or_an_old_file_is_refused(name: str, nbytes: int, reason: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(bytes(nbytes))
    ran = sizes(tmp_path)
    assert (ran.returncode, ran.stderr) == (1, f"{file}: {reason}\n")


def test_a_wheel_with_another_file_or_without_one_is_refused(tmp_path: Path) -> None:
    program, wheel = ROOT / "tests/install/contents.py", tmp_path / "mxep-0.whl"
    tracked = subprocess.run(
        ["git", "ls-files", "core_kernels", "cpp_bindings", "torch_frontend", "jax_frontend"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    names = {f"mxep/{name}" for name in tracked if not name.endswith((".cc", ".h", ".cu", ".cuh", ".def"))}
    names |= {f"mxep/{name}" for name in ("__init__.py", "doctor.py", "conformance.py", "py.typed")}
    names |= {f"mxep-0.dist-info/{name}" for name in ("METADATA", "WHEEL", "RECORD", "licenses/LICENSE")}
    names |= {"mxep/cpp_bindings/_ops.abi3.so"}

    def check(names: set[str]) -> tuple[int, str]:
        with zipfile.ZipFile(wheel, "w") as file:
            for name in names:
                file.writestr(name, "")
        ran = subprocess.run([sys.executable, program, wheel], capture_output=True, text=True)
        return ran.returncode, ran.stderr

    assert check(names) == (0, "")
    assert check(names - {"mxep/doctor.py"}) == (1, "mxep/doctor.py: missing\n")
    assert check(names | {"mxep/core_kernels/fold/cpu.cc"}) == (1, "mxep/core_kernels/fold/cpu.cc: not expected\n")
    assert check(names | {"mxep-0.dist-info/notes"}) == (1, "*.dist-info/notes: not expected\n")
