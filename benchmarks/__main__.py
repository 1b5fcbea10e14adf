"""`python -m benchmarks [cpu | train_step] [--ops quantize_row ...]`: measure, print, record.

cases --check, interleaved timing--> Line --> table on the terminal
                                          '-> results/<hardware>.jsonl, of a clean commit only
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence

from . import cpu, results, train_step

# Section -> (its lines, the file they are recorded in). A section for GPUs has its own file per machine.
SECTIONS: dict[str, tuple[Callable[[Sequence[str]], Iterator[results.Line]], str]] = {
    "cpu": (cpu.lines, "cpu"),
    "train_step": (train_step.lines, "cpu"),
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure, compare and record.")
    parser.add_argument("sections", nargs="*", metavar="section", help=f"of {', '.join(SECTIONS)}; default: all")
    parser.add_argument("--ops", nargs="+", default=[], help="only these ops of a section")
    parser.add_argument("--no-record", action="store_true", help="print the figures and keep none")
    args = parser.parse_args()
    if unknown := set(args.sections) - set(SECTIONS):
        parser.error(f"section: got {', '.join(sorted(unknown))}; allowed: {', '.join(SECTIONS)}")

    run = results.Run()
    print(f"{run.hardware}, {run.date}, commit {run.commit or '(working tree with changes)'}, {run.versions}")
    for section in args.sections or SECTIONS:
        measure, file_name = SECTIONS[section]
        lines = []
        for line in measure(args.ops):
            lines.append(line)
            print(".", end="", file=sys.stderr, flush=True)
        print(f"\n{section}\n{results.table(lines)}")
        print("not recorded, as asked" if args.no_record else results.record(run, lines, file_name))


if __name__ == "__main__":
    main()
