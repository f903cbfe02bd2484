"""Fields that a body holds and Headrace does not act on: refused, ignored in silence, or ignored and named.

A field that would change or constrain the output is never dropped: it is refused unless its value has no effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.errors import UnsupportedError
from server.openai.fields import GenerationBody

SILENT = frozenset(
    {"user", "metadata", "store", "service_tier", "prompt_cache_key", "prompt_cache_retention", "safety_identifier"}
    | {"parallel_tool_calls"}
)
"""Bookkeeping of the client's, without any claim on the output (parallel_tool_calls has none without tools)."""

NO_EFFECT: dict[str, tuple[object, ...]] = {
    "tools": ([],),
    "tool_choice": ("none",),
    "functions": ([],),
    "function_call": ("none",),
    "repeat_penalty": (1,),
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "mirostat": (0,),
    "tfs_z": (1,),
    "top_a": (0,),
    "top_n_sigma": (-1, 0),
    "typ_p": (1,),
    "xtc_probability": (0,),
    "custom_logit_processor": (),
    "logits_processors": ([],),
    "repetition_detection": (),
    "num_beams": (1,),
    "min_new_tokens": (0,),
    "n_predict": (-1,),
    "length_penalty": (1,),
    "no_repeat_ngram_size": (0,),
    "typical_p": (1,),
    "use_beam_search": (False,),
    "suffix": ("",),
    "echo": (False,),
    "logprob_token_ids": (),
    "guided_whitespace_pattern": (),
    "json_schema": (),
    "regex": (),
    "ebnf": (),
    "stop_regex": (),
    "format": (),
    "no_stop_trim": (False,),
    "audio": (),
    "modalities": (["text"],),
    "prediction": (),
    "web_search_options": (),
    "documents": ([],),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "reasoning_effort": ("none",),
    "thinking_token_budget": (),
    "verbosity": ("medium",),
    "previous_response_id": (),
    "conversation": (),
    "input_ids": (),
    "lora": ([],),
    "lora_path": (),
    "mm_processor_kwargs": ({},),
    "truncation_side": ("left",),
    "prompt_embeds": (),
    "kv_transfer_params": (),
    "ec_transfer_params": (),
    "bootstrap_host": (),
    "bootstrap_room": (),
}
"""Fields that would change the output if they worked, each with the values that ask for nothing."""


CHANGES_TEXT = frozenset({"documents", "chat_template", "truncation_side"})
"""Of these, the ones that change what a chat template writes."""


def ignored_params(body: GenerationBody) -> list[str]:
    """Return the names of ignored fields. Raise UnsupportedError for one that asks for what we do not do yet."""
    ignored = []
    for name, value in (body.model_extra or {}).items():
        if name == "best_of":
            _check_best_of(value, body.n)
        elif name in NO_EFFECT:
            _refuse_unless(name, value, NO_EFFECT[name])
        elif name not in SILENT:
            ignored.append(name)
    if body.stream_options is not None:
        ignored += [f"stream_options.{name}" for name in body.stream_options.model_extra or {}]
    return ignored


def ignored_text_params(extras: Mapping[str, Any]) -> list[str]:
    """The same for the bodies of /tokenize and /detokenize, on whose answer sampling parameters have no effect."""
    for name in CHANGES_TEXT.intersection(extras):
        _refuse_unless(name, extras[name], NO_EFFECT.get(name, ()))
    return [name for name in extras if name not in SILENT and name not in CHANGES_TEXT]


def _check_best_of(value: object, choices: int) -> None:
    if value != choices or isinstance(value, bool):
        raise UnsupportedError(
            f"'best_of' must equal 'n' ({choices}): every choice that is made is returned, none is ranked and dropped.",
            param="best_of",
            value=value,
        )


def _refuse_unless(name: str, value: Any, harmless: tuple[object, ...]) -> None:  # noqa: ANN401  (parsed JSON)
    if value not in harmless:
        raise UnsupportedError(f"The parameter '{name}' is not supported yet.", param=name, value=value)
