"""Words that the project's prose avoids: python -m tests.words [FILE ...]

Reads pages, comments, docstrings and messages, never code. Prints FILE:LINE, the words and a replacement; exits with 1
if there are any. Without arguments it reads every tracked file except `UNCHECKED`. CONTRIBUTING has the rules.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# Paths, as git takes them, whose prose is not yet rewritten: delete a line to check it.
UNCHECKED = (
    "tests/words.py",  # these two have the words themselves
    "tests/docs/test_words.py",
)

DATA = r"(?:rows|tokens|bytes|values|data|gradients|counts)"
INSTEAD = {
    # 1. The term of PyTorch, CUDA, JAX or the cited paper.
    r"reckon(?:s|ed|ing)?": "estimate, model",
    r"octaves?": "a factor of 2, a power of 2",
    r"legs?": "transfer, all-to-all",
    r"(?:blocks?|terms?|stages?|words?) apart": "outlier blocks",
    r"(?:has|have|with) place for": "capacity for",
    # 2. The noun again.
    r"(?:that|those) of": "repeat the noun",
    # 3. No clause as a noun.
    r"what (?:leaves|arrives|travels|travell?ed|stays|stayed|is left)": "a noun: sent rows, received rows",
    # 4. Data is sent, received, copied, read, written, saved, freed.
    rf"{DATA} (?:(?:that )?(?:arrive|leave(?! (?:no|out|room)\b)|wander)|that stay)": "sent, received, kept, stored",
    r"travel(?:s|led|ling)?": "sent, received",
    r"(?:lies|lay|lie)": "is, is stored",
    r"lets? go(?: of)?": "frees",
    r"dealt out": "distributed",
    # 5. Relations by their name.
    r"beside": "overlapped with, next to, and",
    r"beneath": "overlapped with, below",
    r"(?<!which\s)(?<!that\s)in turns?": "one after another, without overlap, alternating",
    r"(?:calls|kernels|launches|layers|products|replays|runs|steps|times) in a row": "back to back",
    r"tells? of": "says, reports",
    r"belongs? into": "include in",
    r"multipl(?:y|ies|ied) by themselves": "separately",
    r"in the mean(?! time)": "on average",
    r"as ever": "as before",
}
# A space is any white space, so that words on two lines are found. An attribute, a call and its argument are code.
WORDS = re.compile(
    rf"(?<!\.)(?<!\w\()\b(?:{'|'.join(f'({words})' for words in INSTEAD)})\b(?!\(|\s*==?\s)".replace(" ", r"\s+"),
    re.IGNORECASE,
)

HASH_COMMENTS = (".cmake", ".pyi", ".sh", ".toml", ".yaml", ".yml")
HASH_COMMENT_NAMES = ("CMakeLists.txt", "Makefile", ".gitignore")
C_LIKE = (".cc", ".cu", ".cuh", ".def", ".h")
# Not `tokenize`, which takes five times as long and splits f-strings since Python 3.12. A replacement field must not
# have the quotes of its string, as on Python 3.11.
PYTHON_PROSE = re.compile(
    r"#(?P<comment>[^\n]*)"
    r"|(?:\b(?P<prefix>[bfru]{1,2}))?(?P<quote>\"{3}|'{3}|\"|')(?P<string>(?:[^\\\"']|\\.|(?!(?P=quote))[\"'])*)(?P=quote)",
    re.DOTALL | re.IGNORECASE,
)
C_PROSE = re.compile(
    r"//(?P<line>[^\n]*)|/\*(?P<block>.*?)\*/|\"(?P<string>(?:\\.|[^\"\\\n])*)\"|'(?:\\.|[^'\\\n])'", re.DOTALL
)
CODE_IN_PROSE = re.compile(r"`[^`]*`|\"[^\"\n]{1,30}\"|^ *(?:>>>|\.\.\.) [^\n]*", re.MULTILINE)
CODE_IN_PAGES = re.compile(r"^( *)```.*?^\1```|\]\([^)\n]*\)|<!--.*?-->", re.DOTALL | re.MULTILINE)
REPLACEMENT_FIELD = re.compile(r"\{[^{}]*\}")


def is_name(string: str) -> bool:
    """Whether a string is so short that it is a key, or the name of a test case or a column."""
    return len(string.split()) <= 3


def python_prose(text: str) -> Iterator[tuple[int, str]]:
    """Comments, docstrings and messages."""
    for match in PYTHON_PROSE.finditer(text):
        if match["comment"] is not None:
            yield match.start("comment"), match["comment"]
        elif not is_name(match["string"]):
            said = match["string"]
            if "f" in (match["prefix"] or "").lower():
                for _ in range(2):  # a field's format may have fields
                    said = REPLACEMENT_FIELD.sub(lambda field: blank(field.group()), said)
            yield match.start("string"), said


def c_prose(text: str) -> Iterator[tuple[int, str]]:
    """Comments and messages."""
    for match in C_PROSE.finditer(text):
        kind = match.lastgroup
        if kind is not None and (kind != "string" or not is_name(match[kind])):
            yield match.start(kind), match[kind]


def hash_prose(text: str) -> Iterator[tuple[int, str]]:
    """Comments after `#`."""
    for match in re.finditer(r"(?:^|(?<=\s))#([^\n]*)", text):
        yield match.start(1), match[1]


def page_prose(text: str) -> Iterator[tuple[int, str]]:
    """A page without its blocks of code and addresses of links."""
    yield 0, CODE_IN_PAGES.sub(lambda code: blank(code.group()), text)


PROSE = {
    ".md": page_prose,
    ".py": python_prose,
    **dict.fromkeys(C_LIKE, c_prose),
    **dict.fromkeys(HASH_COMMENTS, hash_prose),
}


def blank(code: str) -> str:
    """Hide code, so that a phrase ends there and offsets hold."""
    return "\0" * len(code)


def found(path: Path) -> Iterator[tuple[int, str, str]]:
    """The line, the words and a replacement of each place in a file."""
    prose = hash_prose if path.name in HASH_COMMENT_NAMES else PROSE.get(path.suffix)
    if prose is None:
        return
    text, at, parts = path.read_text(), 0, []
    for start, said in prose(text):
        between = text[at:start]
        only_marks = not between.strip("\n\t \"'#/fr")  # the next line of a comment, or of a message
        parts += [" " * len(between) if only_marks else blank(between)]
        parts += [CODE_IN_PROSE.sub(lambda code: blank(code.group()), said)]
        at = start + len(said)
    for match in WORDS.finditer("".join(parts)):
        assert match.lastindex is not None
        words = " ".join(match.group().split())
        yield text.count("\n", 0, match.start()) + 1, words, list(INSTEAD.values())[match.lastindex - 1]


def main(*names: str) -> int:
    if not names:
        listed = ["git", "ls-files", "--", ".", *(f":!{path}" for path in UNCHECKED)]
        names = tuple(subprocess.check_output(listed, cwd=ROOT, text=True).splitlines())
    places = [(name, *place) for name in names for place in found(ROOT / name)]
    for name, line, words, instead in places:
        print(f"{name}:{line}: {words!r}: {instead}")
    return int(bool(places))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
