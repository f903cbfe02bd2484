"""From a checked body to the engine's requests: defaults, seeds, and the fan-out into choices."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from engine.errors import RequestError
from engine.protocol import Engine, EngineInfo, GenerateRequest, SamplingParams
from engine.text.machine import TextMachine
from engine.text.stops import StopStrings
from engine.validation import check_grammar, validate
from server.access.priority import chosen_priority
from server.access.record import Caller
from server.access.session import session_of_body
from server.openai.constraints import Constraint, constraint_of
from server.openai.echo import Echo
from server.openai.fields import INT64, GenerationBody
from server.openai.generation import ChoiceRun
from server.service import Service
from server.text_service import TextService

MAX_PROMPT_VALUES = 500_000
"""Values in one answer: a second of work and some tens of megabytes."""


MAX_ALLOWED_VALUES = 2**21
"""Entries of `allowed_token_ids` over all choices of a request: eight choices with a vocabulary of 256 thousand."""


@dataclass(frozen=True)
class Wanted:
    """What a route's own fields come to. `names` are the client's words for the engine's parameters.

    `echoes`, when not empty, has what is shown of each prompt.
    """

    token_limit: int | None
    logprobs: int | None
    with_offsets: bool = False
    prompt_logprobs: int | None = None
    echoes: Sequence[Echo] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    constraint: Constraint | None = None
    names: Mapping[str, str] = field(default_factory=dict)


def choice_runs(
    service: Service,
    engine: Engine,
    text: TextService,
    body: GenerationBody,
    wanted: Wanted,
    prompts: Sequence[list[int]],
    answer_id: str,
    caller: Caller,
) -> list[ChoiceRun]:
    """Return prompt_index * n + j -> choice j of a prompt, each checked as the engine would check it.

    Choices of a prompt share a group and differ in their seed: choice j has seed + j. Without a seed of the client's
    each prompt draws its own, so that equal prompts of one request do not answer alike.
    """
    _check_allowed_values(body, len(prompts))
    if wanted.prompt_logprobs is not None:
        check_prompt_values(sum(map(len, prompts)) * body.n, wanted.prompt_logprobs)
    sampling = sampling_params(body, wanted, text.info)
    stop = StopStrings(body.stop) if body.stop else None
    priority = chosen_priority(body.priority if "priority" in body.model_fields_set else None, caller.priority)
    runs: list[ChoiceRun] = []
    for prompt_index, prompt_ids in enumerate(prompts):
        seed = body.seed if body.seed is not None else secrets.randbelow(INT64)
        group_id = f"{answer_id}-{prompt_index}"
        base = GenerateRequest(
            request_id=group_id,
            group_id=group_id,
            prompt_ids=prompt_ids,
            sampling=sampling,
            cache_scope=service.cache_scope(caller.tenant, body.cache_salt),
            store_kv=body.kv_store,
            priority=priority,
            prompt_logprobs=wanted.prompt_logprobs,
            grammar=None if wanted.constraint is None else wanted.constraint.grammar,
            deadline_unix_s=caller.deadline_unix_s,
            traceparent=None if caller.trace is None else caller.trace.parent,
            tracestate=None if caller.trace is None else caller.trace.state,
            session_id=caller.session or session_of_body(body.model_extra),
        )
        checked = _checked(base, text.info, wanted.names)
        for choice in range(body.n):
            request = msgspec.structs.replace(
                checked,
                request_id=f"{group_id}-{choice}",
                sampling=msgspec.structs.replace(checked.sampling, seed=_wrapped(seed + choice)),
            )
            machine = TextMachine(
                text.codec,
                stop=stop,
                include_stop=body.include_stop_str_in_output,
                min_tokens=body.min_tokens,
                show_special=not body.skip_special_tokens,
                with_offsets=wanted.with_offsets,
            )
            echo = wanted.echoes[prompt_index] if wanted.echoes else None
            run = ChoiceRun(len(runs), engine, request, machine, echo=echo, wants_ids=body.return_token_ids)
            runs.append(run)
    return runs


def _check_allowed_values(body: GenerationBody, prompts: int) -> None:
    """Each choice takes the list with it to the engine."""
    allowed = len(body.allowed_token_ids or ())
    if allowed * prompts * body.n > MAX_ALLOWED_VALUES:
        raise RequestError(
            f"{allowed} allowed_token_ids for each of {prompts * body.n} choices are more than {MAX_ALLOWED_VALUES}"
            " in all: send fewer prompts at once.",
            param="allowed_token_ids",
            value=allowed,
        )


async def checked_constraint(text: TextService, body: GenerationBody) -> Constraint | None:
    """Return what the output has to be, compiled once to see that it can be. Raises RequestError naming the field."""
    constraint = constraint_of(body)
    if constraint is not None:
        try:
            check_grammar(constraint.grammar)
            await text.compile(constraint.grammar)
        except RequestError as error:
            message = f"'{constraint.param}' is no constraint that can be used: {error}"
            raise RequestError(message, param=constraint.param, code=error.code) from error
    return constraint


def check_prompt_values(prompt_tokens: int, alternatives: int) -> None:
    """Bound what an answer tells of its prompts: it is made and sent in one piece."""
    if prompt_tokens * (alternatives + 1) > MAX_PROMPT_VALUES:
        raise RequestError(
            f"{prompt_tokens} prompt tokens with {alternatives} alternatives each are more than {MAX_PROMPT_VALUES}"
            " values to answer with: send fewer prompts at once.",
            param="prompt",
        )


def _checked(request: GenerateRequest, info: EngineInfo, names: Mapping[str, str]) -> GenerateRequest:
    try:
        return validate(request, info)
    except RequestError as error:
        error.param = names.get(error.param or "", error.param)
        raise


def sampling_params(body: GenerationBody, wanted: Wanted, info: EngineInfo) -> SamplingParams:
    """The request's values, where it is silent the model's own defaults, where that is silent the engine's."""
    given = {
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": None if body.top_k is None else max(0, body.top_k),
        "min_p": body.min_p,
        "max_tokens": wanted.token_limit,
        "repetition_penalty": body.repetition_penalty,
    }
    said = {name: value for name, value in given.items() if value is not None}
    defaults = {name: value for name, value in info.generation_defaults.items() if name in given}
    fixed = {
        "min_tokens": body.min_tokens,
        "stop_token_ids": tuple(body.stop_token_ids),
        "ignore_eos": body.ignore_eos,
        "logprobs": wanted.logprobs,
        "presence_penalty": body.presence_penalty,
        "frequency_penalty": body.frequency_penalty,
        "logit_bias": body.logit_bias,
        "bad_words": wanted.bad_words,
        "allowed_token_ids": None if body.allowed_token_ids is None else tuple(body.allowed_token_ids),
    }
    return msgspec.convert({**defaults, **said, **fixed}, SamplingParams)


def _wrapped(seed: int) -> int:
    """Keep a seed in 64 bits."""
    return (seed + INT64) % (2 * INT64) - INT64
