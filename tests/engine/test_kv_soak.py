"""An engine whose store evicts in every tier, and whose clients leave when they like: no answer is wrong, and nothing
grows or is left behind."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from engine.llm import LLM
from engine.protocol import GenerateRequest
from kvstore.tier import Deadline
from tests.support.remote_tiers import running_server
from tests.support.store_llm import BLOCK, complete, engine, forget_device, samplings, store_of
from tests.support.tiny_models import VOCAB_SIZE, write_tiny_llama

MINUTES = 30.0
WARM_ROUNDS = 4
"""What has not been there once by then is not there: buffers, connections, threads."""

MEMORY_GROWTH_BYTES = 16 << 20
OUTPUT_TOKENS = 12


def families(count: int, members: int) -> list[list[int]]:
    """Prompts of up to 24 blocks; those of one family begin alike."""
    rng = random.Random(count)
    found = []
    for _ in range(count):
        shared = rng.choices(range(4, VOCAB_SIZE), k=rng.randint(2, 16) * BLOCK)
        found += [[*shared, *rng.choices(range(4, VOCAB_SIZE), k=rng.randint(1, 8 * BLOCK))] for _ in range(members)]
    return found


class Traffic:
    """Requests for the same prompts again and again, up to eight at once; every fifth client leaves early."""

    def __init__(self, llm: LLM, asked: Sequence[list[int]], expected: Sequence[tuple[int, ...]], seed: int) -> None:
        assert llm._core is not None
        self._llm, self._core = llm, llm._core
        self._asked, self._expected = asked, expected
        self._samplings = samplings(len(asked), OUTPUT_TOKENS)
        self._rng = random.Random(seed)
        self._number = 0
        self._live: dict[str, tuple[int, list[int]]] = {}
        self.left = self.answered = 0

    def round(self, requests: int) -> None:
        """Return when so many more have ended, and nothing is on its way any more."""
        last = self._number + requests
        while self._number < last or self._core.has_work:
            while self._number < last and len(self._live) < 8:
                self._ask()
            self._step()
            if self._live and self._rng.random() < 0.01:
                self._leave(self._rng.choice(list(self._live)))
        if self._rng.random() < 0.5:
            forget_device(self._llm)

    def _ask(self) -> None:
        index = self._rng.randrange(len(self._asked))
        request_id = f"soak-{self._number}"
        self._number += 1
        self._live[request_id] = (index, [])
        self._core.submit(
            GenerateRequest(request_id=request_id, prompt_ids=self._asked[index], sampling=self._samplings[index])
        )

    def _leave(self, request_id: str) -> None:
        del self._live[request_id]
        self._core.abort(request_id)
        self.left += 1

    def _step(self) -> None:
        outputs = self._core.step()
        if not outputs and not self._core.made_progress:
            self._llm._woken.wait(0.001)
            self._llm._woken.clear()
        for output in outputs:
            if output.request_id not in self._live:
                continue
            index, tokens = self._live[output.request_id]
            tokens += output.token_ids
            if output.finish_reason is not None:
                del self._live[output.request_id]
                assert output.finish_reason == "length", output.error
                assert tuple(tokens) == self._expected[index], "the store changed an answer"
                self.answered += 1


def quiet(llm: LLM) -> tuple[int, int]:
    """Check that nothing is left behind; return the descriptors and the bytes of memory of this process."""
    store = store_of(llm)
    assert store.flush(Deadline.after(60.0))
    assert store.ram.overdue(0.0) == [], "a lease was left behind"
    assert not len(store._fetches), "a fetch was left behind"
    counts = store.stats().clients
    assert (counts["requests"], counts["save_waiting"]) == (0, 0)
    assert llm._core is not None
    llm._core.check_integrity()
    store.ram.check_integrity()
    process = psutil.Process(os.getpid())
    return process.num_fds(), process.memory_info().rss


def soak(directory: Path, *, rounds: int = 0, minutes: float = 0.0) -> str:
    """Go on for so many rounds, and at least so many minutes; return what it came to."""
    model = write_tiny_llama(directory / "model")
    asked = families(48, 6)
    with engine(model) as llm:
        expected = [one.token_ids for one in complete(llm, asked, OUTPUT_TOKENS)]
    end = time.monotonic() + 60.0 * minutes
    marks: list[tuple[int, int]] = []
    with running_server(maxmemory="10mb", maxmemory_policy="allkeys-lru") as server:
        tiers = ("ram=16MiB", f"disk={directory / 'kv'},6MiB,min-free=1MiB", server.url)
        with engine(model, *tiers, kv_cache_memory_bytes=2 << 20) as llm:
            traffic = Traffic(llm, asked, expected, seed=1)
            while len(marks) < rounds or time.monotonic() < end:
                traffic.round(100)
                marks.append(quiet(llm))
            stats = store_of(llm).stats()
    warm = marks[min(WARM_ROUNDS, len(marks) // 2)]
    descriptors, memory = marks[-1][0] - warm[0], marks[-1][1] - warm[1]
    figures = (
        f"{len(marks)} rounds, {traffic.answered} answered, {traffic.left} left, "
        f"evicted {[tier.evictions_total for tier in stats.tiers]}, {stats.clients}, "
        f"grown by {memory} bytes and {descriptors} descriptors"
    )
    assert traffic.left > 0
    assert stats.clients["loaded_blocks"] > 0
    if minutes:
        assert all(tier.evictions_total for tier in stats.tiers[:2]), "memory and disk are to evict"
    assert max(fds for fds, _ in marks[len(marks) // 2 :]) <= max(fds for fds, _ in marks[: len(marks) // 2 + 1]), marks
    assert memory < MEMORY_GROWTH_BYTES, (figures, marks)
    return figures


def test_clients_that_leave_and_tiers_that_evict(tmp_path: Path) -> None:
    soak(tmp_path, rounds=2)


@pytest.mark.soak
def test_clients_that_leave_and_tiers_that_evict_for_long(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = soak(tmp_path, minutes=MINUTES)
    with capsys.disabled():
        print(f"\n{figures}")
