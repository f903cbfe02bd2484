"""Grammars by llguidance: an Earley parser over a lexer of derivatives, walked along the vocabulary's trie.

It bounds its own work by fuel, and answers instead of raising. What it does not bound is recursion over a schema's
references, so whoever compiles has a deep stack (engine/grammar/pool.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from llguidance import LLMatcher, LLTokenizer
from llguidance._tokenizer import TokenizerWrapper

from engine.errors import RequestError, UnsupportedError
from engine.grammar.base import GrammarError, Vocabulary
from engine.grammar.llguidance_sources import definition_of, short
from engine.protocol import Grammar


class LLGuidanceBackend:
    """Holds the vocabulary's trie."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        if not vocabulary.eos_ids:
            raise UnsupportedError("this model has no end token, so a grammar could not end its output")
        self._vocabulary = vocabulary
        words = cast(TokenizerWrapper, _Words(vocabulary))
        self._tokenizer = LLTokenizer(words, n_vocab=len(vocabulary.tokens), eos_token=list(vocabulary.eos_ids))

    def compile(self, grammar: Grammar) -> LLGuidanceGrammar:
        matcher = LLMatcher(self._tokenizer, definition_of(grammar), log_level=0)
        if matcher.is_error():
            raise RequestError(short(matcher.get_error()))
        first = matcher.deep_copy()
        mask = first.compute_bitmask()
        if first.is_error() or not any(mask):
            raise RequestError("it allows no text at all")
        return LLGuidanceGrammar(matcher, self._vocabulary.mask_bytes)


class LLGuidanceGrammar:
    def __init__(self, matcher: LLMatcher, mask_bytes: int) -> None:
        self._matcher = matcher
        self._mask_bytes = mask_bytes

    def start(self, output_ids: Sequence[int]) -> LLGuidanceMatcher:
        matcher = self._matcher.deep_copy()
        if output_ids and not matcher.consume_tokens(list(output_ids)):
            raise GrammarError(f"the output so far does not match the grammar: {short(matcher.get_error())}")
        return LLGuidanceMatcher(matcher, self._mask_bytes)


class LLGuidanceMatcher:
    def __init__(self, matcher: LLMatcher, mask_bytes: int) -> None:
        self._matcher = matcher
        self._mask_bytes = mask_bytes
        self.error: str | None = None

    def advance(self, token_id: int) -> bool:
        if not self._matcher.consume_token(token_id):
            self.error = short(self._matcher.get_error())
            raise GrammarError(self.error)
        return self._matcher.is_stopped()

    def mask(self) -> bytes:
        mask = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            self.error = short(self._matcher.get_error())
            return bytes(self._mask_bytes)
        return mask[: self._mask_bytes]


class _Words:
    """The vocabulary in the words that LLTokenizer asks for."""

    is_tokenizer_wrapper = True

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.eos_token_id = vocabulary.eos_ids[0]
        self.bos_token_id = None
        self.tokens = vocabulary.tokens
        self.special_token_ids = list(vocabulary.special_ids)
        self._encode = vocabulary.encode

    def __call__(self, text: str | bytes) -> list[int]:
        return self._encode(text if isinstance(text, str) else text.decode())
