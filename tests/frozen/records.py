"""Records: what hashes hold for, and by case its hashes. Files of records, and what differs between two of them."""

import json
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).parent
CODE = ("sass", "ptx")
"""Records of machine code. A case is named after its kernel there, and names are not compared."""
INPUTS, ERROR = "inputs", "error"

Entry = dict[str, str]
"""The hash of the inputs and of each output by name; or ERROR and its text."""
Cases = dict[str, Entry]


class Case(NamedTuple):
    """A case of a source: the record that it belongs to, and what computes its entry."""

    record: str
    run: Callable[[], Entry]


class Record(NamedTuple):
    """holds_for: versions and machine."""

    holds_for: str
    cases: Cases


def write(path: Path, records: Mapping[str, Record]) -> None:
    """All records in one file."""
    path.write_text(json.dumps({name: record._asdict() for name, record in records.items()}))


def read(path: Path) -> dict[str, Record]:
    return {name: Record(**record) for name, record in json.loads(path.read_text()).items()}


def store(name: str, record: Record) -> None:
    """A line for each case, so that a commit shows which of them changed. The first word of a name is the frontend or
    the architecture: cases that differ in it alone have one line."""
    families: dict[str, Cases] = {}
    for case, entry in sorted(record.cases.items()):
        first, _, rest = case.partition(" ")
        families.setdefault(rest, {})[first] = entry
    lines = [f"{json.dumps(rest)}: {json.dumps(of)}" for rest, of in sorted(families.items())]
    text = f'{{\n"holds_for": {json.dumps(record.holds_for)},\n"cases": {{\n' + ",\n".join(lines) + "\n}\n}\n"
    (FOLDER / f"{name}.json").write_text(text)


def stored(name: str) -> Record | None:
    path = FOLDER / f"{name}.json"
    if not path.exists():
        return None
    found = json.loads(path.read_text())
    families = found["cases"].items()
    return Record(
        found["holds_for"], {f"{first} {rest}".strip(): e for rest, of in families for first, e in of.items()}
    )


def named(cases: Cases, words: list[str]) -> Cases:
    """The cases whose names have one of the words; all without words."""
    return {name: entry for name, entry in cases.items() if not words or any(word in name for word in words)}


class Differences(NamedTuple):
    """differ: lines on cases that differ, are gone or are new. renamed: lines on cases with another name alone."""

    differ: list[str]
    renamed: list[str]


def compare(old: Cases, new: Cases, by_name: bool = True) -> Differences:
    """by_name: whether a case is compared with the one of its name. Machine code is not: kernels may swap names."""
    both: set[str] = set(old) & set(new) if by_name else set()
    differ = [f"{name}: {_what_differs(old[name], new[name])}" for name in sorted(both) if old[name] != new[name]]
    old_rest, new_rest = _without(old, both), _without(new, both)
    gone, come = _unmatched(old_rest, new_rest), _unmatched(new_rest, old_rest)
    for name in sorted(gone | come):
        what = "changed" if name in gone & come else "gone" if name in gone else "new"
        error = new[name].get(ERROR, "") if name in come else ""
        differ.append(f"{name}: {what}" + (f", raises {error}" if error else ""))
    return Differences(differ, _renamed(_without(old_rest, gone), _without(new_rest, come)))


def _without(cases: Cases, names: set[str]) -> Cases:
    return {name: entry for name, entry in cases.items() if name not in names}


def _renamed(old: Cases, new: Cases) -> list[str]:
    """Cases with the same entries: the names that each entry has no longer, and those that it has instead."""
    lines = set()
    for entry in old.values():
        before, after = ({name for name, other in cases.items() if other == entry} for cases in (old, new))
        if before != after:
            lines.add(f"{', '.join(sorted(before - after))} -> {', '.join(sorted(after - before))}")
    return sorted(lines)


def _what_differs(old: Entry, new: Entry) -> str:
    if ERROR in new:
        return f"raises {new[ERROR]}"
    if old.get(INPUTS) != new.get(INPUTS):
        return "other inputs, which say nothing about the outputs"
    return f"{', '.join(key for key in (old | new) if old.get(key) != new.get(key))} differ"


def _unmatched(these: Cases, others: Cases) -> set[str]:
    """The names of `these` with an entry that no other case is left to have. A case of the same name comes first."""
    left = Counter(map(_frozen, others.values()))
    names = set()
    for name, entry in sorted(these.items(), key=lambda item: others.get(item[0]) != item[1]):
        if left[_frozen(entry)]:
            left[_frozen(entry)] -= 1
        else:
            names.add(name)
    return names


def _frozen(entry: Entry) -> Any:
    return tuple(sorted(entry.items()))
