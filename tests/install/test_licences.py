"""The licences of the packages that `pip install 'mxep[torch,jax,flax,transformers]'` brings: permissive ones, and for
tqdm the MPL too, which is of its files alone."""

import re
from importlib.metadata import Distribution, distribution

import pytest

EXTRAS = {"torch", "jax", "flax", "transformers"}
PERMISSIVE = re.compile(r"\b(MIT|BSD|Apache|PSF|ISC|CNRI|BSL|MPL)\b", re.I)


def name_of(requirement: str) -> str:
    return re.sub(r"[-_.]+", "-", re.split(r"[^\w.-]", requirement, maxsplit=1)[0]).lower()


def installed(names: list[str]) -> dict[str, Distribution]:
    """The packages and all that they require without an extra, as far as this environment has them."""
    found: dict[str, Distribution] = {}
    while names:
        name = names.pop()
        if name in found:
            continue
        try:
            found[name] = distribution(name)
        except ModuleNotFoundError:  # of another platform or Python
            continue
        names += [name_of(line) for line in found[name].requires or [] if "extra ==" not in line]
    return found


def licence(package: Distribution) -> str:
    """What the metadata says, the first lines of it where the whole text is there."""
    metadata = package.metadata
    classifiers = metadata.get_all("Classifier") or []
    stated = metadata.get_all("License-Expression") or [text[:60] for text in metadata.get_all("License") or []]
    return " ".join([*stated, *(line.split("::")[-1] for line in classifiers if line.startswith("License ::"))])


def of_extras() -> list[str]:
    lines = distribution("mxep").requires or []
    return [
        name_of(line) for line in lines if not (extra := re.search(r"extra == .([\w-]+)", line)) or extra[1] in EXTRAS
    ]


PACKAGES = {name: package for name, package in installed(of_extras()).items() if name != "mxep"}


def test_every_package_of_the_extras_is_looked_at() -> None:
    assert {"torch", "jax", "jaxlib", "numpy", "ml-dtypes", "flax", "transformers"} <= set(PACKAGES)


@pytest.mark.parametrize("name", sorted(PACKAGES))
def test_a_licence_is_permissive(name: str) -> None:
    found = licence(PACKAGES[name])
    assert PERMISSIVE.search(found), f"{name}: {found or 'no licence in its metadata'}"
    assert "GPL" not in found
