"""Checks of an installation: the packages of `make install-gpu`, and when CMake compiles the CUDA kernels."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import nanobind
import pytest
from packaging.specifiers import SpecifierSet
from scikit_build_core.cmake import CMake

ROOT = Path(__file__).parents[2]
DRIVER = Path("/proc/driver/nvidia/version").exists() or bool(shutil.which("nvidia-smi"))
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


def configure(folder: Path, *options: str, **environment: str) -> tuple[str, str]:
    """What CMake says about the CUDA kernels, in one line; its warnings, in one line too."""
    options = (f"-DPython_EXECUTABLE={sys.executable}", f"-Dnanobind_DIR={nanobind.cmake_dir()}", *options)
    command = [CMake.default_search(version=SpecifierSet(">=3.26")).cmake_path, "-S", ROOT, "-B", folder, *options]
    ran = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})
    assert ran.returncode == 0, ran.stderr
    (line,) = (line for line in ran.stdout.splitlines() if line.startswith("-- CUDA kernels: "))
    return line.removeprefix("-- CUDA kernels: "), " ".join(ran.stderr.split())


def test_cuda_kernels_are_compiled_where_a_driver_could_launch_them(tmp_path: Path) -> None:
    """AUTO, the default, on this machine; then on one whose driver is told to CMake, with an older nvcc on the PATH."""
    said, warned = configure(tmp_path / "here")
    assert "CUDA kernels" not in warned
    if DRIVER:
        assert said.startswith("with /")
    else:
        assert said.startswith(
            "none, this machine has no NVIDIA driver; `pip install . --config-settings=cmake.define."
        )
        assert "MXEP_CUDA=ON` compiles them with nvcc 13.0 or newer" in said

    older = tmp_path / "older/nvcc"
    older.parent.mkdir()
    older.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.9, V12.9.86'\n")
    older.chmod(0o755)
    path = f"{older.parent}{os.pathsep}{os.environ['PATH']}"
    said, warned = configure(tmp_path / "driver", "-DMXEP_DRIVER=/proc/driver/nvidia/version", PATH=path)
    assert said.startswith("with /")
    assert str(older) not in said
    assert f"CUDA kernels: skipped {older} of CUDA 12.9: the kernels need nvcc 13.0 or newer" in warned
