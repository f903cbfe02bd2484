"""An engine over memory and one tier below it, which fails: beside it runs one without a store, and whatever happens
both have to answer alike."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable

from engine.llm import LLM
from kvstore.tier import Deadline
from tests.support.store_llm import BLOCK, complete, forget_device, loaded, store_of, told
from tests.support.tiny_models import VOCAB_SIZE

LIMIT_S = 60.0
"""Only a hang takes so long."""

OUTPUT_TOKENS = 4

_SEEDS = itertools.count()
"""No two trials of a process ask for the same: they may share a server."""


class Trial:
    """Asks for the same prompts and always one new one, so that there is something to load and something to save."""

    def __init__(self, plain: LLM, stored: LLM) -> None:
        self._plain, self._stored = plain, stored
        (self.tier,) = store_of(stored).lower
        self._rng = random.Random(next(_SEEDS))
        self._known: list[list[int]] = []
        self.renew()

    def renew(self) -> None:
        """From now on ask for others."""
        shared = self._prompt(2)
        self._known = [[*shared, *self._prompt(3)] for _ in range(3)]

    def ask(self) -> int:
        """Ask for all, as an engine whose device and memory hold nothing; return the tokens that the tier supplied."""
        forget_device(self._stored)
        store_of(self._stored).ram.drop()
        asked = [*self._known, self._prompt(2)]
        expected = told(complete(self._plain, asked, OUTPUT_TOKENS))
        answers = complete(self._stored, asked, OUTPUT_TOKENS)
        assert told(answers) == expected, "the store changes tokens"
        return loaded(answers)["disk"] + loaded(answers)["remote"]

    def ask_until(self, holds: Callable[[int], bool], what: str) -> None:
        """Ask until the tokens that were supplied say so; a busy machine's look-up may be too late now and then."""
        end = time.monotonic() + LIMIT_S
        while not holds(self.ask()):
            assert time.monotonic() < end, f"not within {LIMIT_S:g} s: {what}"

    def works(self) -> None:
        """Return when prompts come from the tier, saves arrive there, and nothing is left alone any more."""
        self.ask()
        self.ask_until(
            lambda tokens: tokens > 0 and self._saves() and self.breakers == ("closed", "closed"), "the store works"
        )

    def is_left_alone(self, kind: str) -> None:
        """Return when the tier is not even tried any more: by "load" or by "save". One that is known to be full is
        not given what nobody has asked for before."""

        def refused() -> int:
            stats = self.tier.stats()
            if kind == "load":
                return stats.loads.get("refused", 0)
            (behind,) = store_of(self._stored)._behind
            return stats.saves.get("refused", 0) + behind.figures()[2].get("unadmitted", 0)

        before = refused()
        self.ask_until(lambda _: self.breakers != ("closed", "closed") or refused() > before, "the tier is left alone")

    @property
    def breakers(self) -> tuple[str, str]:
        stats = self.tier.stats()
        return stats.load_breaker, stats.save_breaker

    def _saves(self) -> bool:
        """Whether something that is saved now arrives."""
        saved = self.tier.stats().saves.get("ok", 0)
        self.ask()
        assert store_of(self._stored).flush(Deadline.after(LIMIT_S))
        return self.tier.stats().saves.get("ok", 0) > saved

    def _prompt(self, blocks: int) -> list[int]:
        return self._rng.choices(range(4, VOCAB_SIZE), k=blocks * BLOCK + 1)
