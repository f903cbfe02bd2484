"""Grammars that are random walks over token ids, and a pool of them that is late and notices rash matchers.

What may follow is a hash of (source, output so far), so a wrong, early or late mask shows in the tokens.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import Future
from functools import lru_cache

from engine.grammar.base import GrammarError, mask_bytes
from engine.protocol import Grammar


class Walk:
    """A matcher over `vocab_size` ids."""

    def __init__(self, source: str, vocab_size: int) -> None:
        self._state = hash((int(source), 5))
        self._vocab_size = vocab_size
        self.error: str | None = None

    def allowed(self) -> frozenset[int]:
        return _allowed(self._state, self._vocab_size)

    def advance(self, token_id: int) -> bool:
        if token_id not in self.allowed():
            self.error = f"{token_id} is not allowed here"
            raise GrammarError(self.error)
        self._state = hash((self._state, token_id, 5))
        return self._state % 12 == 0

    def mask(self) -> bytes:
        allowed = frozenset() if self.error else self.allowed()
        return sum(1 << token for token in allowed).to_bytes(mask_bytes(self._vocab_size), "little")


@lru_cache(1 << 16)
def _allowed(state: int, vocab_size: int) -> frozenset[int]:
    return frozenset(token for token in range(vocab_size) if hash((state, token)) % 3 == 0)


class WalkGrammar:
    def __init__(self, source: str, vocab_size: int) -> None:
        self._source = source
        self._vocab_size = vocab_size

    def start(self, output_ids: Sequence[int]) -> Walk:
        walk = Walk(self._source, self._vocab_size)
        for token_id in output_ids:
            walk.advance(token_id)
        return walk


class WalkMasks:
    """Masks as they were when they were asked for. Whoever joins them late must not have moved the matchers."""

    def __init__(self, walks: Sequence[Walk]) -> None:
        self._walks = walks
        self._masks = self._now()

    def join(self) -> bytes:
        assert self._now() == self._masks, "a matcher was used while its mask was being made"
        return self._masks

    def _now(self) -> bytes:
        return b"".join(walk.mask() for walk in self._walks)


class WalkPool:
    """In place of a GrammarPool: `submit` may take up to `max_late` looks until the grammar is there."""

    def __init__(self, vocab_size: int, rng: random.Random, max_late: int = 3) -> None:
        self._vocab_size = vocab_size
        self._rng = rng
        self._max_late = max_late
        self.masks_made = 0

    def submit(self, grammar: Grammar) -> Future[WalkGrammar]:
        return _Late(WalkGrammar(grammar.source, self._vocab_size), self._rng.randint(0, self._max_late))

    def masks(self, matchers: Sequence[Walk]) -> WalkMasks:
        self.masks_made += len(matchers)
        return WalkMasks(matchers)


class _Late(Future[WalkGrammar]):
    def __init__(self, grammar: WalkGrammar, looks: int) -> None:
        super().__init__()
        self._grammar = grammar
        self._looks = looks

    def done(self) -> bool:
        self._looks -= 1
        if self._looks < 0 and not super().done():
            self.set_result(self._grammar)
        return super().done()
