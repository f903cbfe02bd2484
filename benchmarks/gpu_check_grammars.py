"""Constrained requests for the checks of gpu_check: a model with random weights, which has no text, is given one.

The first 256 tokens are the bytes, the next one ends a text, and those behind it are pairs of printable letters: a mask
has bits all over the vocabulary.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from itertools import islice, product

from engine.grammar.base import Vocabulary
from engine.grammar.pool import TIME_LIMIT_S, GrammarPool
from engine.protocol import GenerateRequest, Grammar, SamplingParams

EOS_ID = 256

_PATTERN = r"[a-z]{3,9}(-[0-9]{2,4}){1,3}"
_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "size": {"type": "integer", "minimum": 0, "maximum": 9999},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 1, "maxItems": 4},
    },
    "required": ["name", "size", "tags"],
    "additionalProperties": False,
}
_CONSTRAINTS = (Grammar.of_schema(_SCHEMA), Grammar("regex", _PATTERN))
_SAMPLINGS: tuple[dict[str, float], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 21},
    {"temperature": 1.0, "top_p": 0.9, "top_k": 50, "seed": 22},
)


def tokens(vocab_size: int) -> list[bytes]:
    """Return the bytes of each token."""
    letters = bytes(range(0x20, 0x7F))
    pairs = islice(map(bytes, product(letters, repeat=2)), vocab_size - EOS_ID - 1)
    known = [bytes([byte]) for byte in range(256)] + [b"", *pairs]
    return known + [b""] * (vocab_size - len(known))


def byte_pool(vocab_size: int) -> GrammarPool:
    """A pool that has compiled what `constrained` asks for: every run starts these requests at the same step."""

    def vocabulary() -> Vocabulary:
        return Vocabulary(tokens(vocab_size), (), (EOS_ID,), lambda text: list(text.encode()))

    pool = GrammarPool(vocabulary)
    for grammar in _CONSTRAINTS:
        pool.submit(grammar).result(TIME_LIMIT_S)
    return pool


def constrained(prompts: Sequence[list[int]], *, plain: bool, logprobs: int | None) -> list[GenerateRequest]:
    """Each constraint greedy, seeded and, unless `plain`, filtered; their prompts are taken in turn."""
    pairs = list(product(_CONSTRAINTS, _SAMPLINGS[:2] if plain else _SAMPLINGS))
    return [
        GenerateRequest(
            request_id=f"{grammar.kind}{index}",
            prompt_ids=prompts[index % len(prompts)],
            sampling=SamplingParams(max_tokens=120, logprobs=logprobs, **sampling),  # type: ignore[arg-type]
            grammar=grammar,
        )
        for index, (grammar, sampling) in enumerate(pairs)
    ]


def fault_of(request: GenerateRequest, output_ids: Sequence[int], vocab_size: int) -> str:
    """Say why an output is none that its grammar allows, or nothing. All of these grammars end before the limit."""
    assert request.grammar is not None
    table = tokens(vocab_size)
    text = b"".join(table[token] for token in output_ids).decode(errors="replace")
    is_valid = {"json_schema": _is_of_schema, "regex": lambda text: re.fullmatch(_PATTERN, text) is not None}
    return "" if is_valid[request.grammar.kind](text) else f"{request.request_id}: {text!r}"


def _is_of_schema(text: str) -> bool:
    try:
        value = json.loads(text)
    except ValueError:
        return False
    checks: tuple[tuple[str, Callable[[object], bool]], ...] = (
        ("name", lambda name: isinstance(name, str) and len(name) <= 12),
        ("size", lambda size: isinstance(size, int) and 0 <= size <= 9999),
        ("tags", lambda tags: isinstance(tags, list) and 1 <= len(tags) <= 4 and {*tags} <= {"red", "green", "blue"}),
    )
    return value.keys() == {"name", "size", "tags"} and all(is_right(value[name]) for name, is_right in checks)
