"""A grammar pool over a vocabulary of single characters, for engines without a model."""

from __future__ import annotations

import string
from collections.abc import Iterator
from contextlib import contextmanager

from engine.grammar.base import Vocabulary
from engine.grammar.pool import GrammarPool

CHARACTERS = '{}[]":, -.' + string.digits + string.ascii_lowercase + "_()"
EOS_ID = 0
VOCAB_SIZE = 50
TOKENS = [b"<end>", *(character.encode() for character in CHARACTERS)]
assert len(TOKENS) == VOCAB_SIZE


def vocabulary() -> Vocabulary:
    return Vocabulary(TOKENS, (EOS_ID,), (EOS_ID,), ids_of)


def ids_of(text: str) -> list[int]:
    return [1 + CHARACTERS.index(character) for character in text]


def text_of(token_ids: list[int]) -> str:
    return b"".join(TOKENS[token_id] for token_id in token_ids if token_id != EOS_ID).decode()


def allowed(mask: bytes) -> set[str]:
    """Return the tokens that a mask allows, by their text."""
    return {TOKENS[i].decode() for i in range(VOCAB_SIZE) if mask[i // 8] >> i % 8 & 1}


@contextmanager
def grammar_pool() -> Iterator[GrammarPool]:
    pool = GrammarPool(vocabulary)
    try:
        yield pool
    finally:
        pool.close()
