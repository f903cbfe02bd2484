"""What a grammar back end is. Knows token ids and their bytes, but no requests, no sampler and no torch.

A matcher's state is a pure function of (grammar source, output tokens): whoever has both rebuilds it by replay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.protocol import Grammar
from engine.text.tokenizer import TextCodec


class GrammarError(Exception):
    """A matcher cannot go on: a token that it did not allow, or a limit of its own. Ends one request."""


@dataclass(frozen=True)
class Vocabulary:
    """The tokens that the model can choose: bytes by id, b"" for none. `eos_ids` is not empty.

    `encode` turns text into ids.
    """

    tokens: Sequence[bytes]
    special_ids: tuple[int, ...]
    eos_ids: tuple[int, ...]
    encode: Callable[[str], list[int]]

    @classmethod
    def of(cls, codec: TextCodec, vocab_size: int, eos_ids: Sequence[int]) -> Vocabulary:
        """`vocab_size` is the model's, which bounds the codec's."""
        tokens = list(codec.byte_table(show_special=True)[:vocab_size])
        tokens += [b""] * (vocab_size - len(tokens))
        special_ids = tuple(
            token_id for token_id in range(min(vocab_size, codec.vocab_size)) if codec.is_special(token_id)
        )
        return cls(tokens, special_ids, tuple(eos_ids), lambda text: codec.encode(text, parse_special=False))

    @property
    def mask_bytes(self) -> int:
        """Bytes of one mask: a bit per token, lowest first, in whole 32-bit words."""
        return mask_bytes(len(self.tokens))


def mask_bytes(vocab_size: int) -> int:
    return -(-vocab_size // 32) * 4


class Matcher(Protocol):
    """One request's place in its grammar. Used by one thread at a time."""

    def advance(self, token_id: int) -> bool:
        """Take a chosen token; return whether the grammar is complete, so that nothing can follow.

        Raises GrammarError.
        """
        ...

    def mask(self) -> bytes:
        """Return which tokens may come next, the end tokens among them where the grammar accepts.

        Never raises: a matcher that has failed allows nothing, and `error` says why.
        """
        ...

    @property
    def error(self) -> str | None: ...


class CompiledGrammar(Protocol):
    """Shared by all requests with the same source."""

    def start(self, output_ids: Sequence[int]) -> Matcher:
        """Return a matcher behind these output tokens. Raises GrammarError when they do not match."""
        ...


class Backend(Protocol):
    """Compiles for one vocabulary. Used by several threads at once."""

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Raises RequestError (without a param) that tells what is wrong with the source."""
        ...


OpenBackend = Callable[[Vocabulary], Backend]
