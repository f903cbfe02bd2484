"""JSON schemas drawn at random, of the kinds that clients send: nesting, enums, patterns, numbers, $ref and anyOf.

Strings and lists are bounded, as a schema's author does for a small model: one that babbles would not come to an end.
Digits of numbers and the depth of recursion are not.
"""

from __future__ import annotations

import random
from typing import Any

Schema = dict[str, Any]
WORDS = ("name", "kind", "size", "items", "owner", "state", "note", "code", "unit", "list")
PATTERNS = ("^[a-z]{2,8}$", "^[A-Z]{3}-[0-9]{2}$", "^(on|off)$", "^#[0-9a-f]{6}$", "^v[0-9]{1,2}(\\.[0-9])?$")
FORMATS = ("date", "time", "uuid", "ipv4")


def random_schema(rng: random.Random, depth: int = 2) -> Schema:
    """Return an object schema."""
    schema = _object(rng, depth)
    if rng.random() < 0.4:
        part = _object(rng, 0)
        schema["$defs"] = {"part": part}
        name = rng.choice(list(schema["properties"]))
        ref = {"$ref": "#/$defs/part"}
        schema["properties"][name] = rng.choice([ref, {"type": "array", "items": ref, "maxItems": 2}])
        if rng.random() < 0.2:
            part["properties"]["next"] = ref  # never required
    return schema


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(WORDS, rng.randint(1, 4))
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
        lambda: {"type": "string", "minLength": 1, "maxLength": rng.randint(2, 30)},
        lambda: {"type": "string", "format": rng.choice(FORMATS)},
        lambda: {"type": "integer", "minimum": rng.randint(-50, 0), "maximum": rng.randint(1, 5000)},
        lambda: {"type": "number", "exclusiveMinimum": 0, "maximum": rng.choice([1, 10.5, 1000])},
        lambda: {"type": "number", "multipleOf": 0.5, "minimum": 0, "maximum": 100},
        lambda: {"type": ["boolean", "null"]},
        lambda: {"const": rng.choice(["fixed", 7, None])},
        lambda: {"anyOf": [{"type": "null"}, {"type": "integer", "minimum": 1, "maximum": 99}]},
    )
    if depth > 0 and rng.random() < 0.4:
        kind = rng.random()
        if kind < 0.5:
            return _object(rng, depth - 1)
        if kind < 0.65:
            return {"anyOf": [_object(rng, 0), _value(rng, 0)]}
        return {"type": "array", "items": _value(rng, depth - 1), "minItems": 1, "maxItems": rng.randint(1, 3)}
    return rng.choice(leaves)()
