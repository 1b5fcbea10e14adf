"""tests/words.py: `make lint` finds the words that prose avoids, in every kind of file, and never in code."""

from pathlib import Path

import pytest

from .. import words

# Lines with words in prose; elsewhere the same words are code.
FILES = {
    "a.py": (
        '"""A row lies here.\n\n    >>> lies(x.lies)\n"""\n'
        "lies = 'lies', x['the lies']  # it lies\n"
        "# rows, and those\n# of others\n"
        'f"a row {lies:{lies}} lies here"\n'
        'fail("the rows of a rank, and that "\n     f"of {rank}")\n'
        '"""The value of `lies`, a key "lies"."""\n',
        [1, 5, 6, 8],
    ),
    "a.cu": ('// it lies\nlies(1\'000); /* it\n lies */ f("lies", "the row lies here");\n', [1, 3, 3]),
    "a.h": ("// rows and those\n// of others\nconst int lies = 1;\n", [1]),
    "a.md": ("# It lies\n\n```\nlies\n```\n`lies` and those\nof others, [x](lies.md)\n", [1, 6]),
    "a.toml": ('lies = "it lies"  # it lies\n', [1]),
    "Makefile": ("# it lies\nlies: lies\n", [1]),
    "a.txt": ("it lies\n", []),
}


@pytest.mark.parametrize("name", FILES)
def test_prose_is_searched_and_code_is_not(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    text, lines = FILES[name]
    path = tmp_path / name
    path.write_text(text)
    assert [line for line, _, _ in words.found(path)] == lines
    assert words.main(str(path)) == bool(lines)
    printed = capsys.readouterr().out.splitlines()
    assert [line.split(":")[1] for line in printed] == [str(line) for line in lines]


@pytest.mark.parametrize("text", [
    "Apart from that, often a function calls another, which in turn calls a third.",
    "Steps are 3% apart. The values in a row of a TMA box are contiguous, besides the padding.",
    "The rows leave no room for a ring; relies, belied, octavo, elegant, unraveled",
])  # fmt: skip
def test_ordinary_english_passes(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.md").write_text(text)
    assert not list(words.found(tmp_path / "a.md"))


def test_every_pattern_finds_its_words(tmp_path: Path) -> None:
    """A pattern that never matches would pass every file."""
    text = ["reckoned", "octaves", "legs", "blocks apart", "has place for", "those of", "what arrives",
            "rows that stay", "travels", "lay", "lets go of", "dealt out", "beside", "beneath", "in turn",
            "steps in a row", "tells of", "belongs into", "multiplied by themselves", "in the mean",
            "as ever"]  # fmt: skip
    (tmp_path / "a.md").write_text("\n".join(text))
    got = list(words.found(tmp_path / "a.md"))
    assert [said for _, said, _ in got] == text
    assert [instead for _, _, instead in got] == list(words.INSTEAD.values())
