"""The questions and the windows of a text: what a model is asked, and the tokens whose likelihood is measured."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from bench.models.checkpoint import CheckpointError
from bench.tools.files import DATA

# The trained pair has seen the first text, and not the second.
TEXTS = {name: DATA / f"{name}.txt" for name in ("declaration", "gettysburg")}
BYTES = 256
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


class Vocabulary(Protocol):
    """Converts between text and token ids.

    Attributes:
        first: token ids that begin every text.
    """

    first: list[int]

    def encode(self, text: str) -> list[int]:
        """Convert text to token ids, without special ones."""

    def decode(self, ids: Sequence[int]) -> str:
        """Convert token ids to text."""


class ByteVocabulary:
    """A vocabulary whose token ids are the bytes of a text."""

    def __init__(self) -> None:
        self.first: list[int] = []

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode(errors="replace")


class TokenizerVocabulary:
    """The vocabulary of a tokenizer of transformers."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        begin = tokenizer.bos_token_id
        self.first = [begin] if begin is not None and tokenizer.encode("a")[:1] == [begin] else []

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text


def vocabulary_of(folder: Path, vocab_size: int) -> Vocabulary:
    """Return the vocabulary of a checkpoint's folder: of its tokenizer, or bytes if its vocabulary has their size.

    Raises:
        CheckpointError: the folder has no tokenizer, and the token ids are no bytes.
    """
    if any((folder / name).is_file() for name in TOKENIZER_FILES):
        from transformers import AutoTokenizer

        return TokenizerVocabulary(AutoTokenizer.from_pretrained(folder))
    if vocab_size != BYTES:
        raise CheckpointError(
            f"{folder} has no tokenizer, and a vocabulary of {vocab_size}; expected a tokenizer.json, or a vocabulary "
            f"of {BYTES}, whose ids are bytes."
        )
    return ByteVocabulary()


@dataclasses.dataclass(frozen=True)
class Question:
    """A text up to a word, as token ids, and that word."""

    prompt: list[int]
    answer: str

    def answered_by(self, text: str) -> bool:
        """True if the first word of a continuation is the answer."""
        return text.split()[:1] == [self.answer]


@dataclasses.dataclass(frozen=True)
class Window:
    """A context, and the tokens after it: all but the first of these are scored, each given all tokens before it."""

    context: list[int]
    tail: list[int]


@dataclasses.dataclass(frozen=True)
class Task:
    """The questions about one text.

    Attributes:
        name: of the text.
        questions: next words, spread over the text.
        windows: parts of the text, spread over it.
    """

    name: str
    questions: list[Question]
    windows: list[Window]


def task(name: str, vocabulary: Vocabulary, *, context: int, scored: int, questions: int, windows: int) -> Task:
    """Make the task of a text.

    Args:
        name: in `TEXTS`.
        vocabulary: of the model.
        context: tokens before a question's answer, and before a window's tail, at most.
        scored: tokens of each window whose likelihood is measured.
        questions, windows: how many, at most.

    Raises:
        ValueError: the text is too short for such a context.
    """
    text = TEXTS[name].read_text(encoding="utf-8")
    first = vocabulary.first
    # The blank before a word belongs to the word, as in the tokens of most models.
    places = [match.start() for match in re.finditer(r"\s+\S", text)][8:]
    asked = [
        Question(first + vocabulary.encode(text[:place])[-context:], text[place:].split()[0])
        for place in _spread(places, questions)
    ]
    ids = vocabulary.encode(text)
    starts = range(0, len(ids) - context - scored, scored)
    if not starts:
        raise ValueError(
            f"{name} has {len(ids)} tokens, the context is {context}; expected one below {len(ids) - scored}."
        )
    parts = [
        Window(first + ids[start : start + context], ids[start + context : start + context + scored + 1])
        for start in _spread(starts, windows)
    ]
    return Task(name, asked, parts)


def _spread(items: Sequence[int], count: int) -> list[int]:
    """Take that many items, at equal distances; all if there are no more."""
    count = min(count, len(items))
    return [items[index * len(items) // count] for index in range(count)]
