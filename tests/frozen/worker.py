"""A process of the sources: python -m tests.frozen.worker SOURCE SHARD SHARDS OUT [WORDS]

Computes the entries of every SHARDS-th case of the source whose name has one of the WORDS, and writes them to OUT by
record. A case that raises has the error for an entry. A source of several ranks starts them; each computes all entries.
"""

import json
import sys
import traceback
from importlib import import_module
from pathlib import Path

from .records import ERROR, Case, Cases, Entry


def run(case: Case) -> Entry:
    try:
        return case.run()
    except Exception as error:
        traceback.print_exc()
        return {ERROR: f"{type(error).__name__}: {error}".splitlines()[0]}


def main(source: str, shard: str, shards: str, out: str, *words: str) -> None:
    module, *arguments = source.split()
    module = import_module(f".sources.{module}", __package__)
    of_ranks = hasattr(module, "start")
    rank = module.start(f"{out}.ranks") if of_ranks else 0
    cases: dict[str, Case] = module.cases(*arguments)
    chosen = [name for name in cases if not words or any(word in name for word in words)]
    found: dict[str, Cases] = {}
    for name in chosen[int(shard) :: int(shards)]:
        found.setdefault(cases[name].record, {})[name] = run(cases[name])
    if rank == 0:
        Path(out).write_text(json.dumps(found))
    if of_ranks:
        module.end()


if __name__ == "__main__":
    main(*sys.argv[1:])
