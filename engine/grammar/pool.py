"""Compiles grammars in threads of its own and keeps the last ones; others make masks. Knows no requests and no event
loop.

The library lets go of the interpreter's lock while it compiles. A thread cannot be stopped, so the time limit is for
whoever waits; the library's own limits end the work soon after.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from engine.errors import PressureError
from engine.grammar.base import Backend, CompiledGrammar, Matcher, Vocabulary
from engine.grammar.masks import MaskThreads, PendingMasks
from engine.grammar.registry import DEFAULT, open_backend
from engine.protocol import Grammar

THREADS = 2
MAX_QUEUED = 256
MAX_CACHED = 128
TIME_LIMIT_S = 10.0
STACK_BYTES = 128 << 20
"""Reserved, not used: a schema of the largest size can be one long chain of references, each a level of recursion."""


class GrammarPool:
    """`vocabulary` is called once, in a thread of the pool, when the first grammar comes."""

    def __init__(self, vocabulary: Callable[[], Vocabulary], *, backend: str = DEFAULT) -> None:
        self._vocabulary = vocabulary
        self._backend_name = backend
        self._backend: Backend | None = None
        self._opening = threading.Lock()
        self._lock = threading.Lock()
        self._executor: ThreadPoolExecutor | None = None
        self._masks = MaskThreads()
        self._closed = False
        self._queued = 0
        self._grammars: OrderedDict[bytes, Future[CompiledGrammar]] = OrderedDict()

    def submit(self, grammar: Grammar) -> Future[CompiledGrammar]:
        """Return the grammar's future, which several may share. It fails with RequestError for a bad source.

        Raises PressureError when too many wait, RuntimeError after close().
        """
        key = hashlib.sha256(f"{grammar.kind}\0{grammar.source}".encode("utf-8", "surrogatepass")).digest()
        with self._lock:
            known = self._grammars.get(key)
            if known is not None:
                self._grammars.move_to_end(key)
                return known
            if self._closed:
                raise RuntimeError("this grammar pool is closed")
            if self._queued >= MAX_QUEUED:
                raise PressureError("too many grammars wait to be compiled")
            self._queued += 1
            future = self._threads().submit(self._compile, grammar)
            self._grammars[key] = future
            while len(self._grammars) > MAX_CACHED:
                self._grammars.popitem(last=False)
        future.add_done_callback(lambda done: self._ended(key, done))
        return future

    def masks(self, matchers: Sequence[Matcher]) -> PendingMasks:
        """Begin to make the masks of these matchers."""
        return self._masks.start(matchers)

    def close(self) -> None:
        self._masks.close()
        with self._lock:
            self._closed = True
            executor, self._executor = self._executor, None
        if executor is not None:  # without the lock, which what it cancels asks for
            executor.shutdown(wait=False, cancel_futures=True)

    def _threads(self) -> ThreadPoolExecutor:
        if self._executor is None:
            self._executor = ThreadPoolExecutor(THREADS, "grammar")
            before = threading.stack_size(STACK_BYTES)
            try:  # all threads start now: the size is the interpreter's, not the pool's
                barrier = threading.Barrier(THREADS)
                for _ in range(THREADS):
                    self._executor.submit(barrier.wait)
            finally:
                threading.stack_size(before)
        return self._executor

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        with self._opening:
            if self._backend is None:
                self._backend = open_backend(self._backend_name, self._vocabulary())
        return self._backend.compile(grammar)

    def _ended(self, key: bytes, future: Future[CompiledGrammar]) -> None:
        with self._lock:
            self._queued -= 1
            if (future.cancelled() or future.exception() is not None) and self._grammars.get(key) is future:
                del self._grammars[key]
