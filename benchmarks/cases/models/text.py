"""Tokens of a text, for models with any vocabulary and without their tokenizers.

Words with the space before them, and marks, are tokens; the id of a token is its rank by frequency. So the ids have the
frequencies of real text, and a router, also one of random weights, sends different numbers of tokens to its experts.
"""

import re
from collections import Counter

import numpy as np

from examples.training.data import library_files

WORD = re.compile(r" ?\w+| ?[^\w\s]|\s+")


def text_of_library(words: int) -> list[str]:
    """The first words of the standard library's files."""
    found: list[str] = []
    for file in library_files():
        found += WORD.findall(file.read_text(errors="replace"))
        if len(found) >= words:
            return found[:words]
    raise ValueError(f"text: got {len(found)} words of the standard library; expected {words}")


def token_ids(words: list[str], vocabulary: int) -> np.ndarray:
    """Ranks by frequency, int64; ranks past the vocabulary begin again at 0.

    >>> token_ids(["if", " x", ":", " x"], 2).tolist()
    [1, 0, 0, 0]
    """
    rank = {word: i for i, (word, _) in enumerate(Counter(words).most_common())}
    return np.array([rank[word] % vocabulary for word in words], np.int64)
