"""The fields that constrain an output, in the words of OpenAI, vLLM and llama.cpp, to one grammar. Knows no back end.

A constraint is never dropped: what is not understood here is refused by its name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from engine.errors import RequestError, UnsupportedError
from engine.protocol import Grammar
from server.openai.fields import GenerationBody

MAX_CHOICES = 1024


@dataclass(frozen=True)
class Constraint:
    """`param` is the field of the body that asks for it."""

    grammar: Grammar
    param: str


def constraint_of(body: GenerationBody) -> Constraint | None:
    """Return what the body asks for. Raises RequestError naming the field."""
    found = [*_response_format(body.response_format), *_structured_outputs(body.structured_outputs)]
    guided: tuple[tuple[str, Any, Read], ...] = (
        ("guided_json", body.guided_json, _schema),
        ("guided_regex", body.guided_regex, _regex),
        ("guided_choice", body.guided_choice, _choices),
        ("guided_grammar", body.guided_grammar, _grammar),
        ("grammar", body.grammar, _grammar),
    )
    found += [Constraint(read(value, name), name) for name, value, read in guided if value is not None]
    if len(found) > 1:
        names = " and ".join(f"'{constraint.param}'" for constraint in found)
        raise RequestError(f"Only one constraint on the output is possible, not {names}.", param=found[1].param)
    return found[0] if found else None


def _response_format(value: Mapping[str, Any] | None) -> list[Constraint]:
    if value is None:
        return []
    kind, param = value.get("type"), "response_format"
    allowed = {"text": set(), "json_object": {"schema"}, "json_schema": {"json_schema"}}.get(str(kind))
    if allowed is None:
        raise UnsupportedError(
            "'response_format.type' must be 'text', 'json_object' or 'json_schema'.", param=param, value=kind
        )
    _only(value, {"type", *allowed}, param)
    if kind == "text":
        return []
    if kind == "json_object":
        schema = value.get("schema")
        return [Constraint(Grammar("json_object") if schema is None else _schema(schema, param), param)]
    described = value.get("json_schema")
    if not isinstance(described, dict):
        raise RequestError("'response_format.json_schema' must be an object with a 'schema'.", param=param)
    _only(described, {"name", "description", "schema", "strict"}, f"{param}.json_schema")
    if not isinstance(described.get("name", ""), str):
        raise RequestError("'response_format.json_schema.name' must be a string.", param=param)
    if not isinstance(described.get("strict") or False, bool):
        raise RequestError("'response_format.json_schema.strict' must be true or false.", param=param)
    if described.get("schema") is None:
        raise RequestError("'response_format.json_schema' has no 'schema'.", param=param)
    return [Constraint(_schema(described["schema"], param), param)]


def _structured_outputs(value: Mapping[str, Any] | None) -> list[Constraint]:
    param = "structured_outputs"
    given = {name: member for name, member in (value or {}).items() if member is not None}
    if not given:
        return []
    _only(given, {*READERS, "json_object"}, param)
    if len(given) > 1:
        raise RequestError(f"'{param}' takes one constraint, not {' and '.join(given)}.", param=param)
    ((name, member),) = given.items()
    if name == "json_object":
        if member is not True:
            raise RequestError(f"'{param}.json_object' can only be true.", param=param, value=member)
        return [Constraint(Grammar("json_object"), param)]
    return [Constraint(READERS[name](member, param), param)]


def _schema(value: object, param: str) -> Grammar:
    """A JSON schema as an object, or as the JSON text of one."""
    if isinstance(value, str):
        return Grammar("json_schema", value)
    if not isinstance(value, dict | bool):
        raise RequestError(f"'{param}' needs a JSON schema: an object.", param=param)
    return Grammar.of_schema(value)


def _regex(value: object, param: str) -> Grammar:
    return Grammar("regex", _text(value, "regular expression", param))


def _grammar(value: object, param: str) -> Grammar:
    return Grammar("grammar", _text(value, "grammar, in Lark's notation or in GBNF", param))


def _choices(value: object, param: str) -> Grammar:
    if not isinstance(value, list) or not value or not all(isinstance(choice, str) and choice for choice in value):
        raise RequestError(f"'{param}' needs a list of strings that are not empty.", param=param)
    if len(value) > MAX_CHOICES:
        raise RequestError(f"'{param}' may have {MAX_CHOICES} choices at most.", param=param, value=len(value))
    return Grammar.of_choices(value)


def _text(value: object, what: str, param: str) -> str:
    if not isinstance(value, str) or not value:
        raise RequestError(f"'{param}' needs a {what}.", param=param)
    return value


Read = Callable[[object, str], Grammar]
READERS: dict[str, Read] = {"json": _schema, "regex": _regex, "choice": _choices, "grammar": _grammar}


def _only(value: Mapping[str, Any], names: set[str], where: str) -> None:
    for name, member in value.items():
        if name not in names and member is not None:
            raise UnsupportedError(
                f"'{where}.{name[:64]}' is not supported: it could change the output.", param=where.split(".")[0]
            )
