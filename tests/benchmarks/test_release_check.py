"""A headline is older than its kernels if a commit after its lines changes a source that the lines time."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks import release_check
from benchmarks.figures import speed

ROOT = Path(__file__).parents[2]


def headline(*commits: str) -> speed.Headline:
    rows: list[dict[str, Any]] = [{"commit": commit, "date": "2026-11-27"} for commit in commits]
    return speed.Headline("layer", rows, ("swiglu",))


@pytest.fixture
def commit(tmp_path: Path) -> Any:
    """A function that changes a file in a repository of one's own, and returns the commit."""

    def git(*args: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
        return subprocess.run(
            ["git", *identity, *args], cwd=tmp_path, capture_output=True, text=True, check=True
        ).stdout.strip()

    def change(name: str) -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(path.read_text() + "x" if path.exists() else "x")
        git("add", name)
        git("commit", "--quiet", "--message", f"change {name}")
        return git("rev-parse", "HEAD")

    git("init", "--quiet")
    return change


@pytest.mark.parametrize(
    ("name", "is_older"),
    [
        ("core_kernels/swiglu/backward/bwd.cuh", True),
        ("core_kernels/swiglu/kernel.py", True),
        ("core_kernels/cuda/sm90.cuh", True),
        ("core_kernels/swiglu/folded/cpu.cc", False),
        ("core_kernels/swiglu/cases.py", False),
        ("core_kernels/swiglu/oracle.py", False),
        ("core_kernels/combine/cuda.cu", False),  # not a kernel of this headline
        ("README.md", False),
    ],
)
def test_a_later_commit_to_a_timed_kernel(name: str, is_older: bool, commit: Any, tmp_path: Path) -> None:
    measured = commit("core_kernels/swiglu/cuda_mx_row_col.cu")
    last = commit(name)

    def log(of: str, paths: Any) -> list[str] | None:
        return release_check.changes(of, paths, tmp_path)

    found = list(release_check.older([headline(measured)], log))
    assert len(found) == is_older
    if is_older:
        assert f"layer: got lines of {measured[:7]}, 2026-11-27" in found[0]
        assert f"1 commits that change its kernels, the last {last[:7]}" in found[0]
    assert not list(release_check.older([headline(last)], log))
    unknown = list(release_check.older([headline(last, "0" * 40)], log))
    assert unknown == ["layer: got lines of 0000000, which is not in this history; expected an ancestor"]


def test_every_folder_of_a_headline_exists() -> None:
    """A renamed folder would have no changes."""
    for name in {*speed.EP_KERNELS, *speed.LAYER_KERNELS, *speed.PRODUCT_KERNELS, "cuda"}:
        assert any((ROOT / "core_kernels" / name).rglob("*.py")) or any((ROOT / "core_kernels" / name).glob("*.cuh"))
