"""constraints.txt pins every package of the environment that the tests run in: the same packages on every day."""

import re
from importlib.metadata import distributions
from pathlib import Path

import pytest

LINES = (Path(__file__).parents[2] / "constraints.txt").read_text().splitlines()
OURS_AND_PIPS = {"mxep", "pip", "setuptools", "wheel"}


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_every_installed_package_has_its_version_in_the_constraints() -> None:
    """If this fails, a new package needs another one: add it, at the version that pip chose."""
    pinned = {normalized(name): version for name, version in (line.split("==") for line in LINES if "==" in line)}
    installed = {normalized(d.metadata["Name"]): d.version.split("+")[0] for d in distributions()}
    installed = {name: version for name, version in installed.items() if name not in OURS_AND_PIPS}
    if any(".dev" in version for version in installed.values()):
        pytest.skip("a nightly build, which `make upstream-torch` or `make upstream-jax` has installed")
    assert not {name: version for name, version in installed.items() if pinned.get(name) != version}


def test_no_bound_is_open() -> None:
    assert not [
        line for line in LINES if line and not line.startswith("#") and not re.fullmatch(r"[\w.-]+==[\w.]+", line)
    ]
