"""The script that starts torchtitan: its command line, and the text that it writes."""

import json
from pathlib import Path

from tokenizers import Tokenizer

from examples.integrations.train_torchtitan import arguments, write_assets


def test_the_command_line() -> None:
    given = ["--override.imports", "a.b", "--training.seq_len", "64", "activation-checkpoint:full"]
    words = arguments(given, Path("x"), "c.d")
    assert words[-6:] == ["--override.imports", "c.d", *given[1:]]
    assert words.count("--training.seq_len") == words.count("--override.imports") == 1
    assert words[words.index("--hf_assets_path") + 1] == "x"
    joined = ['--override.imports=a.b={"c": 1}', "d", "--training.seq_len=64"]
    words = arguments(joined, Path("x"), "c.d")
    assert words[-6:] == ["--override.imports", "c.d", 'a.b={"c": 1}', "d", "--training.seq_len", "64"]
    assert words.count("--training.seq_len") == words.count("--override.imports") == 1
    assert arguments(["--x"], Path("x"), "c.d")[-3:] == ["--override.imports", "c.d", "--x"]


def test_every_byte_is_a_token(tmp_path: Path) -> None:
    write_assets(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = json.loads((tmp_path / "text" / "data.json").read_text().splitlines()[0])["text"][:500] + " é\n"
    ids = tokenizer.encode(text).ids
    assert len(ids) == len(text.encode())
    assert max(ids) < 256
    assert tokenizer.decode(ids) == text
