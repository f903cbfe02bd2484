"""One simulated worker: steps of chunked prefill and decode over a block cache, in virtual time.

A step computes up to `chunk_tokens` of prompts, first come first served, and one token for each request that decodes.
It takes as long as the slower of reading the weights and computing the prompts, and the reading of what decoding needs:

    step = max(weights_s, prompt tokens / prefill_rate) + context tokens / attention_rate
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable

import msgspec

from engine.protocol import EngineLoad
from router.simulate.block_cache import BlockCache
from router.simulate.virtual_time import VirtualTime
from router.simulate.workload import TRACE_BLOCK_TOKENS, SimRequest


class WorkerModel(msgspec.Struct, frozen=True, kw_only=True):
    """Rates are in tokens/s. `attention_rate` 0 makes the context free. `cache_blocks` are of `block_tokens`."""

    prefill_rate: float = 20_000.0
    weights_s: float = 0.02
    attention_rate: float = 100e6
    chunk_tokens: int = 2048
    max_running: int = 256
    cache_blocks: int = 4000
    block_tokens: int = TRACE_BLOCK_TOKENS


class Job:
    """One request at one worker. `is_received` when its KV comes from another worker: only its last token is computed.

    `on_first` is called with the cached tokens when the first output is there, `on_end` after the last.
    """

    __slots__ = (
        "blocks",
        "cached_tokens",
        "is_received",
        "on_end",
        "on_first",
        "outputs",
        "private",
        "request",
        "shared",
        "todo",
    )

    def __init__(
        self,
        request: SimRequest,
        *,
        outputs: int,
        on_first: Callable[[int], None],
        on_end: Callable[[], None],
        is_received: bool = False,
    ) -> None:
        self.request = request
        self.outputs = outputs
        self.on_first = on_first
        self.on_end = on_end
        self.is_received = is_received
        self.blocks: list[bytes] = []  # shared blocks that it holds
        self.private = 0  # and how many others
        self.shared = 0  # leading blocks of its prompt that are shared, by it or by one that was faster
        self.cached_tokens = 0
        self.todo = 1 if is_received else request.prompt_tokens


class SimWorker:
    """`on_step` is called after each step with the load and the keys that were stored and removed."""

    def __init__(
        self,
        worker_id: str,
        time: VirtualTime,
        model: WorkerModel,
        on_step: Callable[[SimWorker, EngineLoad, list[bytes], list[bytes]], None],
    ) -> None:
        self.worker_id = worker_id
        self.prefill_tokens = 0
        self.in_flight_s = 0.0  # integral of requests over time
        self._time = time
        self._model = model
        self._on_step = on_step
        self._cache = BlockCache(model.cache_blocks)
        self._waiting: deque[Job] = deque()
        self._prefilling: deque[Job] = deque()
        self._queued_tokens = 0
        self._ends: dict[int, list[Job]] = defaultdict(list)  # by the step that gives the last token
        self._decoding = 0
        self._context = 0
        self._steps = 0
        self._is_stepping = False
        self._requests = 0
        self._changed_s = 0.0
        self._prefill_busy_s = self._decode_busy_s = 0.0
        self._decode_tokens = self._decode_context = 0

    def submit(self, job: Job) -> None:
        self._count_requests(+1)
        # What is cached now is no work; whether it still is when it begins is seen then.
        if not job.is_received:
            job.cached_tokens = self._cached_tokens(job)
            job.todo = job.request.prompt_tokens - job.cached_tokens
        self._queued_tokens += job.todo
        self._waiting.append(job)
        if not self._is_stepping:
            self._begin_step()

    def load(self) -> EngineLoad:
        return EngineLoad(
            running=self._decoding + len(self._prefilling),
            waiting=len(self._waiting),
            queued_uncached_tokens=self._queued_tokens,
            kv_blocks_used=self._cache.used,
            kv_blocks_total=self._model.cache_blocks,
            steps_total=self._steps,
            prefill_tokens_total=self.prefill_tokens,
            prefill_busy_s_total=self._prefill_busy_s,
            running_context_tokens=self._context,
            decode_tokens_total=self._decode_tokens,
            decode_context_tokens_total=self._decode_context,
            decode_busy_s_total=self._decode_busy_s,
        )

    def close_books(self) -> None:
        """Bring `in_flight_s` up to now."""
        self._count_requests(0)

    def _begin_step(self) -> None:
        self._admit()
        chunks = self._plan_chunks()
        if not chunks and not self._decoding:
            self._is_stepping = False
            return
        self._is_stepping = True
        model, tokens = self._model, sum(count for _, count in chunks)
        seconds = max(model.weights_s, tokens / model.prefill_rate)
        if model.attention_rate:
            seconds += self._context / model.attention_rate
        self._time.after(seconds, lambda: self._end_step(chunks, tokens, seconds))

    def _admit(self) -> None:
        """Let waiting requests begin, in order, while their prompts and answers fit."""
        while self._waiting and self._decoding + len(self._prefilling) < self._model.max_running:
            job = self._waiting[0]
            cached = 0 if job.is_received else self._cached_tokens(job)
            keys = job.request.keys[: -(-cached // self._model.block_tokens)]
            tokens = job.request.prompt_tokens + job.outputs
            # What could never fit takes all there is: a real engine would have refused it at the door.
            blocks = min(-(-tokens // self._model.block_tokens), self._model.cache_blocks)
            if not self._cache.reserve(keys, blocks):
                return
            job.blocks, job.shared, job.private = list(keys), len(keys), blocks - len(keys)
            if not job.is_received:
                self._queued_tokens -= job.todo
                job.cached_tokens, job.todo = cached, job.request.prompt_tokens - cached
                self._queued_tokens += job.todo
            self._prefilling.append(self._waiting.popleft())

    def _cached_tokens(self, job: Job) -> int:
        """Return the cached tokens of a prompt. Its last token is always computed."""
        cached = self._cache.match(job.request.keys) * self._model.block_tokens
        return min(cached, job.request.prompt_tokens - 1)

    def _plan_chunks(self) -> list[tuple[Job, int]]:
        left, chunks = self._model.chunk_tokens, []
        for job in self._prefilling:
            count = min(left, job.todo)
            chunks.append((job, count))
            left -= count
            if not left:
                break
        return chunks

    def _end_step(self, chunks: list[tuple[Job, int]], tokens: int, seconds: float) -> None:
        self._steps += 1
        if tokens:
            self.prefill_tokens += tokens
            self._prefill_busy_s += seconds
        else:
            self._decode_tokens += self._decoding
            self._decode_context += self._context
            self._decode_busy_s += seconds
        self._context += self._decoding
        for job in self._ends.pop(self._steps, ()):
            self._decoding -= 1
            self._context -= job.request.prompt_tokens + job.outputs
            self._end(job)
        for job, count in chunks:
            self._advance(job, count)
        self._on_step(self, self.load(), *self._cache.take_events())
        self._begin_step()

    def _advance(self, job: Job, count: int) -> None:
        self._queued_tokens -= count
        job.todo -= count
        if not job.is_received:
            self._publish(job)
        if job.todo:
            return
        self._prefilling.remove(job)
        job.on_first(job.cached_tokens)
        if job.outputs == 1:
            self._end(job)
            return
        self._decoding += 1
        self._context += job.request.prompt_tokens + 1
        self._ends[self._steps + job.outputs - 1].append(job)

    def _publish(self, job: Job) -> None:
        """Share the full blocks that are computed by now."""
        computed = (job.request.prompt_tokens - job.todo) // self._model.block_tokens
        for key in job.request.keys[job.shared : computed]:
            if job.private and self._cache.publish(key):
                job.private -= 1
                job.blocks.append(key)
        job.shared = max(job.shared, computed)

    def _end(self, job: Job) -> None:
        self._cache.release(job.blocks, job.private)
        self._count_requests(-1)
        job.on_end()

    def _count_requests(self, change: int) -> None:
        self.in_flight_s += self._requests * (self._time.now - self._changed_s)
        self._changed_s = self._time.now
        self._requests += change
