"""`make release-check`: fail if a headline figure of the README is older than the kernels that it times.

headlines --commit of the lines--> git log commit..HEAD -- the kernels' sources --any--> older
          '-commit not in this history--------------------------------------------------> unknown

Sources are the files of the headline's folders in core_kernels that run on a GPU, and of core_kernels/cuda, which all
kernels include. A change of a comment counts too: nothing else says that a time is the same.
"""

import argparse
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from .figures.results import newest
from .figures.speed import Headline, headlines
from .figures.tables import table_ep

ROOT = Path(__file__).parents[1]
# Of a folder: sources of the CPU, cases and definitions, which no GPU runs.
NOT_TIMED = ("cpu.cc", "cpu.h", "cpu_*.cc", "cases.py", "oracle.py", "oracle_*.py")
Log = Callable[[str, Sequence[str]], list[str] | None]
"""The commits after a commit that changed a path, newest first; none if they changed it back; None if the commit is not
in the history."""


def sources(headline: Headline) -> list[str]:
    """Git's paths of the kernels that a headline times."""
    folders = [f"core_kernels/{name}" for name in (*headline.kernels, "cuda")]
    return [*folders, *(f":(exclude,glob)core_kernels/**/{name}" for name in NOT_TIMED)]


def changes(commit: str, paths: Sequence[str], root: Path = ROOT) -> list[str] | None:
    """`Log` of the git repository at `root`."""
    known = subprocess.run(
        ["git", "merge-base", "--is-ancestor", commit, "HEAD"], cwd=root, capture_output=True, check=False
    )
    if known.returncode:
        return None
    if not subprocess.run(["git", "diff", "--quiet", commit, "HEAD", "--", *paths], cwd=root, check=False).returncode:
        return []
    log = subprocess.run(
        ["git", "log", "--format=%h %s", f"{commit}..HEAD", "--", *paths],
        cwd=root, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return log.stdout.splitlines()


def older(found: Sequence[Headline], log: Log) -> Iterator[str]:
    """A message for each headline and commit that is older than a kernel, or unknown."""
    for headline in found:
        for commit, date in dict.fromkeys((row["commit"], row["date"]) for row in headline.rows):
            changed = log(commit, sources(headline))
            if changed is None:
                yield f"{headline.what}: got lines of {commit[:7]}, which is not in this history; expected an ancestor"
            elif changed:
                since = f"{len(changed)} commits that change its kernels, the last {changed[0]}"
                yield f"{headline.what}: got lines of {commit[:7]}, {date}; expected lines newer than {since}"


def main() -> None:
    argparse.ArgumentParser("python -m benchmarks.release_check", description=__doc__).parse_args()
    found = list(headlines(newest("h200"), newest("h200_ep", table_ep.is_ep)))
    wrong = list(older(found, changes))
    if not found:
        sys.exit("release_check: got no headline; expected lines in benchmarks/results")
    print("\n".join(wrong) or f"all {len(found)} headlines are as new as their kernels")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
