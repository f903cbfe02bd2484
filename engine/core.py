"""The engine's loop: the door, one step after another, and one terminal output for every accepted request.

Knows no HTTP, no text and no torch: a Runner computes. One thread owns it; nothing here waits except for the runner.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import msgspec

from engine.config import EngineConfig
from engine.deadlines import Deadlines
from engine.errors import (
    ConfigError,
    DrainingError,
    HeadraceError,
    PressureError,
    PromptTooLongError,
    RequestError,
    RequestFailedError,
    UnsupportedError,
)
from engine.grammar.base import CompiledGrammar, GrammarError
from engine.grammar.pool import TIME_LIMIT_S, GrammarPool
from engine.kv.event_log import KVEventLog
from engine.kv.groups import KVGroups
from engine.load import Totals, load_of
from engine.plan import Row, RowResult, Runner, StepPlan, StepResult
from engine.protocol import (
    EngineInfo,
    EngineLoad,
    FinishReason,
    GenerateRequest,
    KVPort,
    Timings,
    TokenLogprobs,
    TokenOutput,
)
from engine.request import Request, RequestState
from engine.scheduler import Scheduler
from engine.validation import GRAMMAR_PARAM, sequence_window, validate

Clock = Callable[[], float]


class EngineCore:
    """One engine. `num_blocks` has the size of each KV group's pool, null block included.

    `info` tells limits and special ids, `config` the loop's settings. The caller owns `runner`, `kv_port` and
    `grammars`, without which no output is constrained, and closes them. `clock` is monotonic, `wall_clock` is what
    deadlines are in; both in seconds. `event_log` hears what the prefix cache can serve.
    """

    def __init__(
        self,
        info: EngineInfo,
        config: EngineConfig,
        runner: Runner,
        num_blocks: Sequence[int],
        kv_port: KVPort | None = None,
        *,
        clock: Clock = time.monotonic,
        wall_clock: Clock = time.time,
        event_log: KVEventLog | None = None,
        grammars: GrammarPool | None = None,
    ) -> None:
        if kv_port is not None and not config.prefix_cache:
            raise ConfigError("a KV port needs the prefix cache", hint="leave prefix_cache on")
        self.info = info
        self._runner = runner
        self._max_in_flight = max(1, min(runner.max_in_flight, config.in_flight_steps or runner.max_in_flight))
        self._max_running = info.max_running
        self._max_waiting = config.max_waiting
        self._clock = clock
        on_block = None if event_log is None else event_log.on_block
        self.kv = KVGroups(info.kv_groups, num_blocks, info.block_size, on_block)
        self.scheduler = Scheduler(
            self.kv,
            max_running=info.max_running,
            max_step_tokens=config.max_step_tokens or info.max_step_tokens,
            prefix_cache=config.prefix_cache,
            port=kv_port,
            event_log=event_log,
        )
        alone = self.kv.max_sequence_tokens
        self._max_sequence_tokens = sequence_window(info) if alone is None else min(alone, sequence_window(info))
        self._requests: dict[str, Request] = {}
        self._grammars = grammars
        self._compiling: list[tuple[Request, Future[CompiledGrammar], float]] = []
        self._arrivals = 0
        self._deadlines = Deadlines(clock, wall_clock, lambda: len(self._requests))
        self._outputs: list[TokenOutput] = []
        self._draining = False
        self._made_progress = False
        self._totals = Totals()

    # ---- the door

    def submit(self, request: GenerateRequest) -> None:
        """Accept a request: from here on it gets exactly one terminal output from step().

        A higher attempt of a live request takes its place: the earlier one has lost its client. Raises RequestError
        (bad, or in use), DrainingError and PressureError; nothing has happened then.
        """
        spec = validate(request, self.info)
        if len(spec.prompt_ids) + len(spec.resume_ids) >= self._max_sequence_tokens:
            raise PromptTooLongError(len(spec.prompt_ids), self._max_sequence_tokens, param="prompt")
        earlier = self._requests.get(spec.request_id)
        if earlier is not None and earlier.spec.attempt >= spec.attempt:
            raise RequestError(f"request_id {spec.request_id!r} is in use", param="request_id", value=spec.request_id)
        if self._draining:
            raise DrainingError("this engine is draining and takes no new requests")
        if len(self.scheduler.waiting) + len(self._compiling) >= self._max_waiting:
            raise PressureError(f"{self._max_waiting} requests are waiting already")
        grammar = self._compile(spec)
        if earlier is not None:
            self._end(earlier, "abort", error="a later attempt took its place", error_code="superseded")
        self._accept(spec, grammar)

    def _compile(self, spec: GenerateRequest) -> Future[CompiledGrammar] | None:
        if spec.grammar is None:
            return None
        if self._grammars is None:
            raise UnsupportedError("this engine does not constrain its output", param=GRAMMAR_PARAM)
        return self._grammars.submit(spec.grammar)

    def _accept(self, spec: GenerateRequest, grammar: Future[CompiledGrammar] | None) -> None:
        if spec.sampling.seed is None:
            sampling = msgspec.structs.replace(spec.sampling, seed=secrets.randbits(63))
            spec = msgspec.structs.replace(spec, sampling=sampling)
        max_tokens = spec.sampling.max_tokens
        assert max_tokens is not None, "validate() sets it"
        request = Request(
            spec,
            arrival=self._arrivals,
            arrived_s=self._clock(),
            max_total_tokens=min(len(spec.prompt_ids) + max_tokens, self._max_sequence_tokens),
            eos_ids=self.info.eos_ids,
            block_size=self.info.block_size,
        )
        self._arrivals += 1
        self._requests[spec.request_id] = request
        self._totals.prompt_tokens += request.prompt_len
        if spec.deadline_unix_s is not None:
            self._deadlines.watch(spec.deadline_unix_s, request)
        if grammar is None:
            self.scheduler.add(request)
        else:
            request.state = RequestState.COMPILING
            self._compiling.append((request, grammar, self._clock()))

    def finish(self, request_id: str, keep_tokens: int) -> None:
        """End a request as complete; output tokens from `keep_tokens` on are overshoot. Unknown ids are ignored."""
        request = self._requests.get(request_id)
        if request is not None:
            request.keep_tokens = request.prompt_len + max(0, keep_tokens)
            self._end(request, "stop")

    def abort(self, request_id: str) -> None:
        """End a request that nobody waits for. Unknown ids are ignored."""
        request = self._requests.get(request_id)
        if request is not None:
            self._end(request, "abort")

    def drain(self) -> None:
        """Take nothing new; what was accepted goes on."""
        self._draining = True

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes, e.g. because the weights changed."""
        self.scheduler.reset_prefix_cache()

    def cached_blocks(self, keys: Sequence[bytes]) -> int:
        """Return how many leading blocks of a chain can be served from the device."""
        return self.kv.match(keys, len(keys) * self.info.block_size + 1).num_blocks

    # ---- the loop

    def step(self) -> list[TokenOutput]:
        """Run one iteration and return what is new, in order. Blocks only in the runner, when it has enough to do."""
        for request in self._deadlines.expired():
            self._end(request, "abort", error="the deadline has passed", error_code="deadline_exceeded")
        compiled = self._take_compiled() if self._compiling else 0
        loaded = self.scheduler.poll_port()
        plan = self.scheduler.schedule(self._clock())
        if plan is not None and plan.num_masks:
            self._launch_constrained(plan)
        elif plan is not None:
            self._runner.launch(plan)
        results = self._collect(launched=plan is not None)
        for result in results:
            self._process(result)
        self._made_progress = plan is not None or len(results) > 0 or loaded > 0 or compiled > 0
        outputs, self._outputs = self._outputs, []
        return outputs

    @property
    def has_work(self) -> bool:
        """Whether step() can still do something: requests, steps in flight, blocks at the port, or outputs to fetch."""
        return bool(self._requests or self._outputs or len(self.scheduler.ledger) or self.scheduler.port.busy)

    @property
    def made_progress(self) -> bool:
        """Whether the last step() launched, collected or loaded anything. If not, all wait for the KV port or for their
        grammars: a loop should pause for a moment instead of spinning."""
        return self._made_progress

    @property
    def compiling(self) -> int:
        """Requests that wait for their grammar."""
        return len(self._compiling)

    def _take_compiled(self) -> int:
        """Let requests go on whose grammars are there; return how many wait no longer. Nobody waits here."""
        now_s, waiting = self._clock(), self._compiling
        self._compiling = []
        for entry in waiting:
            request, grammar, since_s = entry
            if request.finished:
                continue
            if grammar.done():
                self._start_with(request, grammar)
            elif now_s - since_s > TIME_LIMIT_S:
                error = f"the grammar was not compiled within {TIME_LIMIT_S:g} s"
                self._end(request, "error", error=error, error_code=RequestError.code)
            else:
                self._compiling.append(entry)
        return len(waiting) - len(self._compiling)

    def _start_with(self, request: Request, grammar: Future[CompiledGrammar]) -> None:
        try:
            request.matcher = grammar.result().start(request.tokens[request.prompt_len :])
        except (HeadraceError, GrammarError) as error:
            code = error.code if isinstance(error, HeadraceError) else RequestFailedError.code
            self._end(request, "error", error=f"grammar: {error}", error_code=code)
        except Exception as error:
            # Whatever it was, it is this request's alone.
            self._end(request, "error", error=f"grammar: {error!r}", error_code=RequestFailedError.code)
        else:
            request.state = RequestState.WAITING
            self.scheduler.add(request)

    def _launch_constrained(self, plan: StepPlan) -> None:
        """Launch a step that has masks, and make them beside its forward pass.

        A mask stands behind the token before. Where that is one of a step in flight, it has to come back first; the
        forward pass, which reads it on the device, does not wait.
        """
        assert self._grammars is not None, "submit() refuses grammars without a pool"
        rows, requests = plan.rows, self.scheduler.ledger.newest.requests
        constrained = [one for row, one in zip(rows, requests, strict=True) if row.grammar_row is not None]
        matchers = [one.matcher for one in constrained if one.matcher is not None]
        known = all(one.pending == 1 for one in constrained)
        masks = self._grammars.masks(matchers) if known else None
        self._runner.launch(plan)
        if masks is None:
            while len(self.scheduler.ledger) > 1:
                for result in self._runner.collect(block=True):
                    self._process(result)
            # Some may have ended on the way: their rows are overshoot, and any mask will do.
            masks = self._grammars.masks(matchers)
        self._runner.choose(masks.join())

    def _collect(self, *, launched: bool) -> Sequence[StepResult]:
        """Wait for a result when the runner is full, or when there was nothing to launch."""
        in_flight = len(self.scheduler.ledger)
        if in_flight == 0:
            return ()
        return self._runner.collect(block=in_flight >= self._max_in_flight or not launched)

    def _process(self, result: StepResult) -> None:
        """Turn one step's results into tokens, published blocks and outputs; then free what only this step used."""
        launched = self.scheduler.ledger.close(result.step)
        now_s = self._clock()
        prefill_tokens = context_tokens = 0
        totals = self._totals
        output_tokens = totals.output_tokens
        for row, request, row_result in zip(launched.plan.rows, launched.requests, result.rows, strict=True):
            if row.token_ids is not None:
                prefill_tokens += row.count
            if row.sample:
                request.pending -= 1
                context_tokens += row.start + row.count
            # A finished request's row is overshoot: it ended while this step was in flight.
            if request.state is not RequestState.FINISHED:
                self._apply(row, request, row_result, now_s)
        self.scheduler.close_step(launched)
        totals.steps += 1
        if prefill_tokens:
            totals.add_prefill(prefill_tokens, result.compute_s)
            self.scheduler.port.observe_prefill(prefill_tokens, result.compute_s)
        else:
            totals.add_decode(totals.output_tokens - output_tokens, context_tokens, result.compute_s)

    def _apply(self, row: Row, request: Request, result: RowResult, now_s: float) -> None:
        if result.error is not None or (row.sample and not result.token_ids):
            self._fail(request, result.error or "the runner returned no token", result.error_code)
            return
        self.scheduler.complete(request, row.start + row.count)
        if result.prompt_logprobs is not None:
            request.add_prompt_logprobs(row.start, result.prompt_logprobs)
        if not row.sample:
            if request.prefill_only and row.start + row.count == request.prompt_len:
                self._end(request, "length")
            return
        offset = len(request.tokens) - request.prompt_len
        try:
            reason = request.extend(result.token_ids)
        except GrammarError as error:
            self._fail(request, str(error))
            return
        tokens, logprobs = list(result.token_ids), None
        if reason is not None:
            del tokens[request.num_outputs - offset :]  # drafts accepted behind the end
        if result.logprobs is not None:
            logprobs = list(result.logprobs[: len(tokens)])
        self._totals.output_tokens += len(tokens)
        if request.first_token_s is None:
            request.first_token_s = now_s
        if reason is not None:
            self._end(request, reason, tokens=tokens, logprobs=logprobs)
        elif request.output_started:
            spec = request.spec
            self._outputs.append(TokenOutput(spec.request_id, spec.attempt, offset, tokens, None, None, logprobs))
        else:
            self._outputs.append(self._first_output(request, offset, tokens, logprobs))

    def _fail(self, request: Request, error: str, code: str = RequestFailedError.code) -> None:
        """End a request at which a step has failed. Nothing of it is worth keeping."""
        if request.matcher is not None and request.matcher.error is not None:
            error, code = f"grammar: {request.matcher.error}", RequestFailedError.code
        request.keep_tokens = 0
        self._end(request, "error", error=error, error_code=code)

    def _first_output(
        self, request: Request, offset: int, tokens: list[int], logprobs: list[TokenLogprobs] | None
    ) -> TokenOutput:
        request.output_started = True
        if request.cached is not None:
            self._totals.cached_tokens += request.cached.total
        return TokenOutput(
            request.request_id,
            request.spec.attempt,
            offset,
            tokens,
            logprobs=logprobs,
            cached=request.cached,
            prompt_logprobs=None if request.prompt_logprobs_missing else request.prompt_logprobs,
        )

    def _end(
        self,
        request: Request,
        reason: FinishReason,
        *,
        tokens: Sequence[int] = (),
        logprobs: list[TokenLogprobs] | None = None,
        error: str | None = None,
        error_code: str | None = None,
    ) -> None:
        """Put out the terminal output and retire the request: the only place where one ends."""
        offset = request.num_outputs - len(tokens)
        if request.output_started:
            output = TokenOutput(request.request_id, request.spec.attempt, offset, list(tokens), logprobs=logprobs)
        else:
            output = self._first_output(request, offset, list(tokens), logprobs)
        # The last token of a grammar ends a request as well, and belongs to the text.
        stop_token = tokens[-1] if reason == "stop" and tokens and tokens[-1] in request.end_set else None
        self._outputs.append(
            msgspec.structs.replace(
                output,
                finish_reason=reason,
                stop_token=stop_token,
                timings=_timings(request, self._clock()),
                error=error,
                error_code=error_code,
            )
        )
        del self._requests[request.request_id]
        self._totals.endings[reason] += 1
        self.scheduler.retire(request)

    # ---- what others ask

    def load(self) -> EngineLoad:
        """Tell what happens now, at a cost that does not grow with the queue."""
        compiling = (request for request, _, _ in self._compiling)
        return load_of(
            self.scheduler,
            self.kv,
            self._totals,
            live=len(self._requests),
            compiling=compiling,
            draining=self._draining,
        )

    def check_integrity(self) -> None:
        """Raise AssertionError when the books do not add up. For tests; cost grows with everything there is."""
        self.scheduler.check_integrity(self._max_running)
        for request in self._requests.values():
            assert not request.finished, "a finished request is still listed"
        live = len(self.scheduler.running) + len(self.scheduler.waiting)
        assert live <= len(self._requests), "a request runs or waits that is not listed"


def _timings(request: Request, now_s: float) -> Timings:
    started_s = now_s if request.started_s is None else request.started_s
    first_token_s = now_s if request.first_token_s is None else request.first_token_s
    return Timings(started_s - request.arrived_s, first_token_s - started_s, now_s - first_token_s)
