"""Offline inference in one process: `LLM(model).generate(prompts)` and `.chat(conversations)`.

Composes what a server spreads over processes: the engine's core with its runner, the text codec, the chat template and
one text machine per prompt. Owns the loop that feeds and steps the core; knows nothing of how the core schedules.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Never, cast

import msgspec
from tqdm import tqdm

from engine.completion import Completion, CompletionRun, Usage
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.errors import ConfigError, EngineDiedError, PressureError, RequestError, UnsupportedError
from engine.grammar.pool import TIME_LIMIT_S, GrammarPool
from engine.kv.open_store import open_store
from engine.plan import Runner
from engine.protocol import EngineInfo, GenerateRequest, Grammar, SamplingParams
from engine.text.chat import ChatTemplate, Message
from engine.text.machine import TextMachine
from engine.text.stops import StopStrings
from engine.text.tokenizer import TextCodec
from engine.validation import check_grammar, validate

__all__ = ["LLM", "Completion", "Grammar", "SamplingParams", "Usage"]

_WAIT_S = 0.001
"""How long the loop pauses at most while all requests wait for grammars or for stored KV."""

_LONG_RUN_S = 2.0
"""A progress bar that nobody asked for appears after this long."""


class LLM:
    """A loaded model. Close it, or use it as a context manager, to give its memory back.

    `model` is a directory, a GGUF file, a packaged model's name or a hub's org/name; `settings` are the other fields of
    EngineConfig. Raises ConfigError and ModelError. Calls from several threads take turns.
    """

    def __init__(self, model: str = "smollm2", **settings: object) -> None:
        config = _config(model, settings)
        # Everything else here is free of torch: `import engine.llm` costs nothing yet.
        from engine.runner.build import build_engine

        codecs: list[TextCodec] = []
        with _LoadingBar() as bar:
            info, runner, num_blocks, assets = build_engine(config, bar.show, lambda codec, *_: codecs.append(codec))
        self.info: EngineInfo = info
        (self.codec,) = codecs
        self._template = ChatTemplate.from_assets(info.text, assets)
        self._runner: Runner | None = runner
        self._grammars = GrammarPool.of(self.codec, info.vocab_size, info.eos_ids)
        self._woken = threading.Event()
        self._store = None
        if config.kv_store:
            from engine.runner.kv_memory import KVMemory

            self._store = open_store(config, info, KVMemory(runner.cache, info.kv_groups), self._woken.set)
        port = None if self._store is None else self._store.port
        self._core: EngineCore | None = EngineCore(info, config, runner, num_blocks, port, grammars=self._grammars)
        self._max_live = config.max_waiting
        self._numbers = itertools.count()
        self._turn = threading.Lock()

    @property
    def default_sampling(self) -> SamplingParams:
        """What the model's authors recommend, and SamplingParams' own defaults where they are silent."""
        return msgspec.convert(self.info.generation_defaults, SamplingParams)

    def generate(
        self,
        prompts: str | Sequence[int] | Sequence[str | Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        grammar: Grammar | Sequence[Grammar | None] | None = None,
        stop: str | Sequence[str] = (),
        progress: bool | None = None,
    ) -> list[Completion]:
        """Complete raw prompts, each a text or token ids, and return one completion per prompt in their order.

        `sampling` is one for all or one per prompt; None is `default_sampling`. `grammar` constrains what is written,
        again for all or per prompt. `progress` None shows a bar on a terminal when the run is long. Raises RequestError
        naming the prompt or the parameter before anything runs.
        """
        listed = _listed_prompts(prompts)
        ids = [self._prompt_ids(prompt, f"prompts[{index}]") for index, prompt in enumerate(listed)]
        return self._complete(ids, "prompts", sampling, grammar, stop, progress)

    def chat(
        self,
        conversations: Sequence[Message] | Sequence[Sequence[Message]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        grammar: Grammar | Sequence[Grammar | None] | None = None,
        stop: str | Sequence[str] = (),
        progress: bool | None = None,
        template_variables: Mapping[str, object] | None = None,
    ) -> list[Completion]:
        """Answer one conversation (a list of {"role", "content"} messages) or several, as `generate` does prompts."""
        ids = [
            self._conversation_ids(messages, f"conversations[{index}]", template_variables)
            for index, messages in enumerate(_listed_conversations(conversations))
        ]
        return self._complete(ids, "conversations", sampling, grammar, stop, progress)

    def close(self) -> None:
        """Give the model's memory back. A second call does nothing."""
        with self._turn:
            if self._runner is not None:
                if self._store is not None:
                    self._store.close()
                    self._store = None
                self._grammars.close()
                self._runner.close()
                self._runner = self._core = None

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _prompt_ids(self, prompt: str | Sequence[int], param: str) -> list[int]:
        if isinstance(prompt, str):
            return self.codec.encode(prompt, parse_special=True, add_bos=True, param=param)
        if isinstance(prompt, bytes) or not isinstance(prompt, Sequence):
            raise RequestError(f"{param} must be a text or a list of token ids", param=param, value=prompt)
        return list(cast("Sequence[int]", prompt))

    def _conversation_ids(
        self, messages: Sequence[Message], param: str, variables: Mapping[str, object] | None
    ) -> list[int]:
        if self._template is None:
            raise UnsupportedError(
                "this model has no chat template: give one as chat_template, or use generate()", param="conversations"
            )
        if isinstance(messages, str) or not isinstance(messages, Sequence) or not messages:
            raise RequestError(f"{param} must be a list of messages", param=param, value=messages)
        for index, message in enumerate(messages):
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise RequestError(f"{param}[{index}] must be a mapping with a role", param=f"{param}[{index}]")
        try:
            text = self._template.render(messages, variables=variables)
        except RequestError as error:
            if error.param is not None and error.param.startswith("messages"):
                error.param = param + error.param.removeprefix("messages")
            elif error.param == "chat_template_kwargs":
                error.param = "template_variables"
            raise
        return self.codec.encode(text, parse_special=True, param=param)

    def _complete(
        self,
        prompts: Sequence[list[int]],
        param: str,
        sampling: SamplingParams | Sequence[SamplingParams] | None,
        grammar: Grammar | Sequence[Grammar | None] | None,
        stop: str | Sequence[str],
        progress: bool | None,
    ) -> list[Completion]:
        samplings = self._samplings(sampling, len(prompts))
        grammars = _listed_grammars(grammar, len(prompts))
        self._check_grammars(grammars, one_for_all=isinstance(grammar, Grammar))
        stops = _stop_strings(stop)
        per_prompt = isinstance(sampling, Sequence)
        runs = []
        for index, (ids, own, constraint) in enumerate(zip(prompts, samplings, grammars, strict=True)):
            request = GenerateRequest(
                request_id=f"llm-{next(self._numbers)}", prompt_ids=ids, sampling=own, grammar=constraint
            )
            request = _validated(request, self.info, f"{param}[{index}]", f"sampling[{index}]." if per_prompt else "")
            machine = TextMachine(self.codec, stop=stops, min_tokens=request.sampling.min_tokens)
            runs.append(CompletionRun(request, machine))
        with self._turn, _bar(len(runs), progress) as bar:
            self._run(runs, bar)
        return [run.completion() for run in runs]

    def _samplings(
        self, sampling: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> list[SamplingParams]:
        if sampling is None:
            sampling = self.default_sampling
        if isinstance(sampling, SamplingParams):
            return [sampling] * count
        if not isinstance(sampling, Sequence):
            raise RequestError("sampling must be SamplingParams or a list of them", param="sampling", value=sampling)
        listed = list(sampling)
        if len(listed) != count:
            raise RequestError(f"sampling has {len(listed)} entries for {count} prompts", param="sampling")
        for index, own in enumerate(listed):
            if not isinstance(own, SamplingParams):
                raise RequestError(f"sampling[{index}] must be SamplingParams", param=f"sampling[{index}]", value=own)
        return listed

    def _check_grammars(self, grammars: Sequence[Grammar | None], *, one_for_all: bool) -> None:
        """Compile each once, before anything runs."""
        for one, index in {one: index for index, one in enumerate(grammars) if one is not None}.items():
            param = "grammar" if one_for_all else f"grammar[{index}]"
            try:
                check_grammar(one)
                self._grammars.submit(one).result(TIME_LIMIT_S)
            except TimeoutError as error:
                raise RequestError(f"{param} was not compiled within {TIME_LIMIT_S:g} s", param=param) from error
            except RequestError as error:
                raise RequestError(f"{param}: {error}", param=param, code=error.code) from error

    def _run(self, runs: Sequence[CompletionRun], bar: tqdm[Never]) -> None:
        """Feed and step the core until every run has its terminal output. An interruption leaves the core empty."""
        core = self._core
        if core is None:
            raise RuntimeError("this LLM is closed")
        waiting = deque(runs)
        live: dict[str, CompletionRun] = {}
        tokens = 0
        try:
            while waiting or live:
                while waiting and len(live) < self._max_live and _accepted(core, waiting[0].request, alone=not live):
                    run = waiting.popleft()
                    live[run.request.request_id] = run
                outputs, ended = core.step(), len(live)
                if not outputs and not core.made_progress:
                    if not core.compiling and self._store is None:
                        raise EngineDiedError(
                            "the engine makes no progress: an earlier fault has lost one of its steps"
                        )
                    self._woken.wait(_WAIT_S)
                    self._woken.clear()
                for output in outputs:
                    keep_tokens = live[output.request_id].take(output)
                    tokens += len(output.token_ids)
                    if keep_tokens is not None:
                        core.finish(output.request_id, keep_tokens)
                    if output.finish_reason is not None:
                        del live[output.request_id]
                bar.set_postfix_str(f"{tokens} tokens", refresh=False)
                bar.update(ended - len(live))
        finally:
            _empty(core, live)


def _config(model: str, settings: Mapping[str, object]) -> EngineConfig:
    known = EngineConfig.__struct_fields__
    for name in settings:
        if name not in known:
            raise ConfigError(f"{name!r} is not a setting of the engine", hint=f"Settings: {', '.join(known)}.")
    try:
        return msgspec.convert({"model": str(model), **settings}, EngineConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"a setting of the engine is wrong: {error}") from error


def _listed_prompts(prompts: str | Sequence[int] | Sequence[str | Sequence[int]]) -> Sequence[str | Sequence[int]]:
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise RequestError("prompts must be a text, token ids, or a list of these", param="prompts", value=prompts)
    if isinstance(prompts, bytes) or (prompts and all(isinstance(entry, int) for entry in prompts)):
        return [cast("Sequence[int]", prompts)]
    return cast("Sequence[str | Sequence[int]]", prompts)


def _listed_conversations(
    conversations: Sequence[Message] | Sequence[Sequence[Message]],
) -> Sequence[Sequence[Message]]:
    if isinstance(conversations, str) or not isinstance(conversations, Sequence):
        raise RequestError("conversations must be a list of messages, or a list of such lists", param="conversations")
    if conversations and isinstance(conversations[0], Mapping):
        return [cast("Sequence[Message]", conversations)]
    return cast("Sequence[Sequence[Message]]", conversations)


def _listed_grammars(grammar: Grammar | Sequence[Grammar | None] | None, count: int) -> list[Grammar | None]:
    if grammar is None or isinstance(grammar, Grammar):
        return [grammar] * count
    if isinstance(grammar, str) or not isinstance(grammar, Sequence):
        raise RequestError("grammar must be a Grammar or a list of them", param="grammar", value=grammar)
    listed = list(grammar)
    if len(listed) != count:
        raise RequestError(f"grammar has {len(listed)} entries for {count} prompts", param="grammar")
    for index, own in enumerate(listed):
        if own is not None and not isinstance(own, Grammar):
            raise RequestError(f"grammar[{index}] must be a Grammar", param=f"grammar[{index}]", value=own)
    return listed


def _accepted(core: EngineCore, request: GenerateRequest, *, alone: bool) -> bool:
    """Submit a request; return False when too many grammars wait to be compiled already."""
    try:
        core.submit(request)
    except PressureError:
        if alone:
            raise
        return False
    return True


def _stop_strings(stop: str | Sequence[str]) -> StopStrings | None:
    strings = [stop] if isinstance(stop, str) else list(stop)
    for string in strings:
        if not isinstance(string, str):
            raise RequestError("stop must be a text or a list of texts", param="stop", value=string)
    return StopStrings(strings) if strings else None


def _validated(request: GenerateRequest, info: EngineInfo, prompt: str, sampling: str) -> GenerateRequest:
    """Check a request at the door, and name what is wrong as the caller of this module knows it."""
    try:
        return validate(request, info)
    except RequestError as error:
        error.param = prompt if error.param == "prompt" else f"{sampling}{error.param}"
        raise


def _empty(core: EngineCore, live: Mapping[str, CompletionRun]) -> None:
    """End what still runs, after an interruption or a fault, so that the next call starts from nothing."""
    for request_id in live:
        core.abort(request_id)
    while live and core.has_work:
        core.step()
        if not core.made_progress:  # A step was lost to a fault: nothing will come of it.
            break


@contextmanager
def _bar(total: int, progress: bool | None) -> Iterator[tqdm[Never]]:
    bar = tqdm(
        total=total,
        unit="prompt",
        miniters=0,  # looks at the clock on every update: the tokens go on while no prompt ends
        disable=None if progress is None else not progress,  # None: unless stderr is no terminal
        delay=0.0 if progress else _LONG_RUN_S,
    )
    with bar:
        yield bar


class _LoadingBar:
    """What the loader reports, on a terminal and when it takes long: a model may have to be fetched first."""

    def __enter__(self) -> _LoadingBar:
        self._bar = tqdm(total=100, unit="%", disable=None, delay=_LONG_RUN_S, leave=False, miniters=0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()

    def show(self, fraction: float, phase: str) -> None:
        # A later phase may start from 0 again.
        self._bar.set_description_str(phase, refresh=False)
        self._bar.n = 0
        self._bar.update(round(fraction * 100))
