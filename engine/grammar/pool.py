"""Compiles grammars in threads of its own and keeps the last ones; others make masks. Knows no requests and no event
loop.

The library lets go of the interpreter's lock while it compiles. A thread cannot be stopped, so the time limit is for
whoever waits; the library's own limits end the work soon after.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from engine.errors import PressureError, RequestError
from engine.grammar.base import Backend, CompiledGrammar, Matcher, Vocabulary
from engine.grammar.masks import MaskThreads, PendingMasks
from engine.grammar.registry import DEFAULT, open_backend
from engine.protocol import Grammar
from engine.text.tokenizer import TextCodec

log = logging.getLogger(__name__)

THREADS = 2
MAX_QUEUED = 256
MAX_CACHED = 128
MAX_CACHED_BYTES = 256 << 20
"""Of what all kept grammars are taken to be. Those that were let go live on as long as a request uses them."""

GRAMMAR_BYTES, BYTES_PER_CHARACTER = 64 << 10, 80
"""What a compiled grammar is taken to be: the library does not tell. Schemas of 0.3 to 80 KB took at most 80 bytes a
character and 30 KB."""

TIME_LIMIT_S = 10.0
STACK_BYTES = 128 << 20
"""Reserved, not used: a schema of the largest size can be one long chain of references, each a level of recursion."""


@dataclass(frozen=True, slots=True)
class _Kept:
    future: Future[CompiledGrammar]
    size_bytes: int


class GrammarPool:
    """`vocabulary` is called once, in a thread of the pool, on `warm_up` or when the first grammar comes."""

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
        self._grammars: OrderedDict[bytes, _Kept] = OrderedDict()
        self._kept_bytes = 0

    @classmethod
    def of(cls, codec: TextCodec, vocab_size: int, eos_ids: Sequence[int]) -> GrammarPool:
        """A pool for a model of this text; `vocab_size` is the model's own."""
        return cls(lambda: Vocabulary.of(codec, vocab_size, eos_ids))

    def warm_up(self) -> Future[None]:
        """Begin to do what the first grammar would wait for. It is no fault when it cannot be done: nobody may ever ask
        for a grammar, and who does is told. Raises RuntimeError after close()."""
        with self._lock:
            if self._closed:
                raise RuntimeError("this grammar pool is closed")
            return self._threads().submit(self._warm_up)

    def submit(self, grammar: Grammar) -> Future[CompiledGrammar]:
        """Return the grammar's future, which several may share. It fails with RequestError for a bad source.

        Raises PressureError when too many wait, RuntimeError after close().
        """
        key = hashlib.sha256(f"{grammar.kind}\0{grammar.source}".encode("utf-8", "surrogatepass")).digest()
        with self._lock:
            known = self._grammars.get(key)
            if known is not None:
                self._grammars.move_to_end(key)
                return known.future
            if self._closed:
                raise RuntimeError("this grammar pool is closed")
            if self._queued >= MAX_QUEUED:
                raise PressureError("too many grammars wait to be compiled")
            self._queued += 1
            future = self._threads().submit(self._compile, grammar)
            self._grammars[key] = kept = _Kept(future, GRAMMAR_BYTES + BYTES_PER_CHARACTER * len(grammar.source))
            self._kept_bytes += kept.size_bytes
            while len(self._grammars) > MAX_CACHED or self._kept_bytes > MAX_CACHED_BYTES:
                self._kept_bytes -= self._grammars.popitem(last=False)[1].size_bytes
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
        try:
            return self._open().compile(grammar)
        except BaseException as error:
            if isinstance(error, Exception):
                raise
            # A fault of a library in another language. Whoever waits for the grammar catches no more than Exception.
            raise RequestError(f"the grammar library has given up: {error}") from error

    def _warm_up(self) -> None:
        try:
            self._open()
        except BaseException as error:  # the library's own faults are no Exception
            log.info("this model takes no grammars: %s", error)

    def _open(self) -> Backend:
        with self._opening:
            if self._backend is None:
                self._backend = open_backend(self._backend_name, self._vocabulary())
            return self._backend

    def _ended(self, key: bytes, future: Future[CompiledGrammar]) -> None:
        with self._lock:
            self._queued -= 1
            failed = future.cancelled() or future.exception() is not None
            kept = self._grammars.get(key)
            if failed and kept is not None and kept.future is future:
                self._kept_bytes -= self._grammars.pop(key).size_bytes
