"""What an installation finds: the packages of `make install-gpu`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BUILD = "'scikit-build-core>=1.1,<2' 'nanobind>=3.1,<4' 'jaxlib==0.10.2'"


def missing(python: str, **environment: str) -> subprocess.CompletedProcess:
    command = [python, str(ROOT / "cmake/missing.py")]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})


def test_here_nothing_is_missing() -> None:
    ran = missing(sys.executable)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The Python of an environment without packages."""
    folder = tmp_path_factory.mktemp("bare")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "env"], check=True)
    return str(folder / "env/bin/python")


def test_an_environment_without_packages(bare: str) -> None:
    ran = missing(bare, PATH="")
    assert ran.returncode == 1
    first, second, third = ran.stderr.splitlines()
    assert first.startswith(f"install-gpu: {bare} lacks scikit-build-core>=1.1,<2, nanobind>=3.1,<4, jaxlib==0.10.2,")
    assert first.endswith(" numpy>=1.26, ml_dtypes>=0.5, cmake>=3.26, torch (or jax) for CUDA")
    assert second.endswith(f"run {bare} -m pip install {BUILD} 'numpy>=1.26' 'ml_dtypes>=0.5' 'cmake>=3.26'")
    assert "jaxlib is for its XLA headers" in third


def test_an_environment_with_torch_alone(bare: str, tmp_path: Path) -> None:
    for package in ("torch", "numpy", "ml_dtypes", "cmake"):
        folder = tmp_path / f"{package}-2.11.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 2.11\n")
    ran = missing(bare, PYTHONPATH=str(tmp_path))
    assert ran.returncode == 1
    assert ran.stderr.splitlines()[1].endswith(f"pip install {BUILD}")
