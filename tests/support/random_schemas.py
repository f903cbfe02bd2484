"""JSON schemas drawn at random, of the kinds that clients send: nesting, enums, patterns, numbers, $ref and anyOf."""

from __future__ import annotations

import random
from typing import Any

Schema = dict[str, Any]
WORDS = ("name", "kind", "size", "items", "owner", "state", "note", "code", "unit", "list")
PATTERNS = ("^[a-z]{2,8}$", "^[A-Z]{3}-[0-9]{2}$", "^(on|off)$", "^#[0-9a-f]{6}$", "^v[0-9]{1,2}(\\.[0-9])?$")


def random_schema(rng: random.Random, depth: int = 2) -> Schema:
    """Return an object schema whose values are all bounded, so that a model comes to an end."""
    schema = _object(rng, depth)
    if rng.random() < 0.4:
        schema["$defs"] = {"part": _object(rng, 0)}
        name = rng.choice(list(schema["properties"]))
        schema["properties"][name] = {"$ref": "#/$defs/part"}
    return schema


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(WORDS, rng.randint(1, 3))
    return {
        "type": "object",
        "properties": {name: _value(rng, depth) for name in names},
        "required": names if rng.random() < 0.7 else names[:1],
        "additionalProperties": False,
    }


def _value(rng: random.Random, depth: int) -> Schema:
    leaves = (
        lambda: {"enum": rng.sample(["red", "green", 1, 2.5, True, None, "a b"], 3)},
        lambda: {"type": "string", "pattern": rng.choice(PATTERNS)},
        lambda: {"type": "string", "minLength": 1, "maxLength": rng.randint(2, 12)},
        lambda: {"type": "integer", "minimum": rng.randint(-50, 0), "maximum": rng.randint(1, 5000)},
        lambda: {"type": "boolean"},
        lambda: {"const": rng.choice(["fixed", 7, None])},
        lambda: {"anyOf": [{"type": "null"}, {"type": "integer", "minimum": 1, "maximum": 99}]},
    )
    if depth > 0 and rng.random() < 0.4:
        if rng.random() < 0.5:
            return _object(rng, depth - 1)
        return {"type": "array", "items": _value(rng, depth - 1), "minItems": 1, "maxItems": rng.randint(1, 3)}
    return rng.choice(leaves)()
