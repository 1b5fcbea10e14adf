"""The command: python -m tests.frozen --write | --compare [--only cpu|ptx|sass|gpu] [-k WORD] ...

Exits with 1 if something differs, is gone, is new or fails. tests/frozen/__init__.py lists the hashed data.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from ..scratch import ROOT, environment, scratch_of
from . import jobs, records
from .holds_for import holds_for
from .records import ERROR, Record

RENAMED = 20
"""Lines on other names of equal machine code."""


def arguments(given: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.frozen", description=__doc__)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--write", action="store_true", help="store the hashes of this tree")
    action.add_argument("--compare", action="store_true", help="compare this tree with the stored hashes")
    parser.add_argument("--only", action="append", choices=jobs.RECORDS, help="all but gpu without a GPU; repeatable")
    parser.add_argument("-k", action="append", metavar="WORD", default=[], help="cases whose names have it; repeatable")
    parser.add_argument("--against", metavar="COMMIT", help="compare with this commit, built and run here")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the hashes there, not into tests/frozen")
    parser.add_argument("--found", type=Path, metavar="FILE", help="read the hashes from there and run nothing")
    parser.add_argument(
        "--jobs", type=int, metavar="N", default=min(os.cpu_count() or 1, 12), help="processes at a time"
    )
    options = parser.parse_args(given)
    if options.against and options.write:
        parser.error("--against: allowed with --compare")
    has_gpu = torch.cuda.is_available()
    if options.found is None and "gpu" in (options.only or ()) and not has_gpu:
        parser.error("--only gpu: torch sees no GPU")
    if options.only is None:
        options.only = [part for part in jobs.RECORDS if part != "gpu" or has_gpu or options.found]
    return options


def main(given: list[str]) -> int:
    options = arguments(given)
    old = of_commit(options.against, options) if options.against else None
    found, failures = _found(options)
    for failure in failures:
        print(failure, file=sys.stderr)
    if options.out:
        records.write(options.out, found)
    if options.compare:
        return _compare(old, found, options.k) | bool(failures)
    return int(bool(failures)) if options.out or failures else _store(found, options.k)


def _found(options: argparse.Namespace) -> tuple[dict[str, Record], list[str]]:
    """This tree's records, and what failed. What cannot be compared is not computed."""
    names = [name for part in options.only for name in jobs.RECORDS[part]]
    if options.found:
        return {name: record for name, record in records.read(options.found).items() if name in names}, []
    here = {name: holds_for(name) for name in names}
    if options.compare and not (options.against or options.out):
        for name, stored in [(name, records.stored(name)) for name in names]:
            if stored is not None and stored.holds_for != here[name]:
                print(_not_compared(name, stored.holds_for, here.pop(name)))
    begin = time.monotonic()
    found, failures = jobs.run(here, options.k, options.jobs)
    print(f"{time.monotonic() - begin:5.0f} s  in all")
    return {name: Record(here[name], cases) for name, cases in found.items()}, failures


def _not_compared(name: str, old: str, new: str) -> str:
    return f"{name}: not compared: the hashes hold for {old}; this is {new}"


def of_commit(commit: str, options: argparse.Namespace) -> dict[str, Record]:
    """The records of a commit, by its own tests/frozen."""
    own = ["git", "cat-file", "-e", f"{commit}:tests/frozen/__main__.py"]
    if subprocess.run(own, cwd=ROOT, capture_output=True).returncode:
        raise SystemExit(f"--against: got {commit}; allowed: a commit that has tests/frozen")
    print(f"{commit}:", flush=True)
    cuda = not {"sass", "gpu"}.isdisjoint(options.only)
    with scratch_of(commit, cuda) as scratch, tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        command = [scratch.python, "-m", "tests.frozen", "--write", "--out", str(out), "--jobs", str(options.jobs)]
        command += [word for part in options.only for word in ("--only", part)]
        command += [word for name in options.k for word in ("-k", name)]
        subprocess.run(command, cwd=scratch.root, env=environment())
        if not out.exists():
            raise SystemExit(f"--against: {commit} made no hashes")
        return records.read(out)


def _compare(old: dict[str, Record] | None, found: dict[str, Record], words: list[str]) -> int:
    """old: of a commit; None: the stored records. Prints the differences. Returns 1 if there are any."""
    differs = 0
    if words and not any(record.cases for record in found.values()):
        print(f"no case has {' or '.join(map(repr, words))} in its name")
        differs = 1
    for name, new in found.items():
        base = records.stored(name) if old is None else old.get(name)
        if base is None:
            print(f"{name}: no hashes are stored")
            differs = 1
        elif base.holds_for != new.holds_for:
            print(_not_compared(name, base.holds_for, new.holds_for))
        else:
            before = records.named(base.cases, words)
            differ, renamed = records.compare(before, new.cases, name not in records.CODE)
            print(f"{name}: {len(new.cases)} cases, " + (f"{len(differ)} differ" if differ else "all equal"))
            for line in (*differ, *(f"renamed: {line}" for line in renamed[:RENAMED])):
                print(f"    {line}")
            if renamed[RENAMED:]:
                print(f"    renamed: {len(renamed)} cases in all")
            differs |= bool(differ)
    return differs


def _store(found: dict[str, Record], words: list[str]) -> int:
    """Write records to the files of this folder; a selection keeps the other cases. Returns 1 if one is not stored."""
    failed = 0
    for name, new in found.items():
        base = records.stored(name)
        errors = {case: entry[ERROR] for case, entry in new.cases.items() if ERROR in entry}
        print("".join(f"{name}: {case}: not stored: raises {error}\n" for case, error in errors.items()), end="")
        failed |= bool(errors)
        new = Record(new.holds_for, {case: entry for case, entry in new.cases.items() if case not in errors})
        if words and base is not None:
            if base.holds_for != new.holds_for:
                print(f"{name}: not stored: the other cases hold for {base.holds_for}; this is {new.holds_for}")
                failed = 1
                continue
            others = {case: e for case, e in base.cases.items() if case not in records.named(base.cases, words)}
            new = Record(new.holds_for, others | new.cases)
        records.store(name, new)
        print(f"{name}: {len(found[name].cases) - len(errors)} cases stored, for {new.holds_for}")
    return failed


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
