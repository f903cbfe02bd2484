"""Grammars as clients write them, in llguidance's own notation. Checks what the library leaves without a bound.

What is wrong with a source beyond that is found when a matcher is made of it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from decimal import Decimal, InvalidOperation

import msgspec
from llguidance import LLMatcher
from llguidance.gbnf_to_lark import gbnf_to_lark

from engine.errors import RequestError
from engine.grammar.regex_size import added_by_repetitions
from engine.protocol import Grammar

WHITESPACE = r"(\x20|\x0A(\x20{0,40}|\x09{0,20}))"
"""What may stand between JSON's tokens: enough for one line and for indented JSON, and no place to idle in for ever."""

MAX_REMAINDERS = 10_000
"""Numbers are told to be multiples of n by their remainders, of which there are n: about a second for so many. Factors
2 and 5 are the decimal notation's own and cost nothing."""

MAX_REPEATED = 10_000
"""Characters that repetitions add to a regular expression when they are written out: some ten milliseconds a mask."""

MAX_GBNF_RULES = 500
"""The conversion looks at every rule once per rule."""

MAX_MESSAGE_CHARS = 300

_GBNF_RULE = re.compile(r"(?m)^[ \t]*[\w-]+[ \t]*::=")
_LARK_REGEX = re.compile(r"\\.|/((?:\\.|[^/\\\n])++)/")
"""The first part is no expression: it keeps escaped slashes from being looked at as the beginning of one."""
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)
_NUMBER_MEMBER = re.compile(r'("(?:[^"\\]|\\.){0,64}+")\s*+:\s*+(-?[0-9][0-9.eE+-]*)')
"""A number in JSON and the name before it; 64 are enough for a name of ten characters, all of them escaped."""


def definition_of(grammar: Grammar) -> str:
    """Return the grammar in the library's notation. Raises RequestError."""
    match grammar.kind:
        case "json_object":
            return _of_schema('{"type":"object"}')
        case "json_schema":
            return _of_schema(grammar.source)
        case "regex":
            _check_repetitions(grammar.source)
            return LLMatcher.grammar_from_regex(grammar.source)
        case "choice":
            return LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, _choices(grammar.source))))
        case "grammar":
            return LLMatcher.grammar_from_lark(_lark(grammar.source))


def short(message: str) -> str:
    """Return one line: behind the first ones stand the parser's own state and the whole source."""
    text = " ".join(message.split("<state>")[0].split())
    return text if len(text) <= MAX_MESSAGE_CHARS else text[:MAX_MESSAGE_CHARS] + "..."


def _of_schema(source: str) -> str:
    # A whole schema may be true or false; the library knows these inside of others only.
    match source.strip():
        case "true":
            source = "{}"
        case "false":
            raise RequestError("it allows no text at all")
    _check_multiples(source)
    for text in _strings(source):
        _check_repetitions(text)
    try:
        return LLMatcher.grammar_from_json_schema(source, overrides={"whitespace_pattern": WHITESPACE})
    except ValueError as error:
        raise RequestError(short(str(error))) from error


def _choices(source: str) -> list[str]:
    try:
        choices = msgspec.json.decode(source, type=list[str])
    except (msgspec.DecodeError, RecursionError) as error:
        raise RequestError("the choices are not a JSON list of strings") from error
    if not choices or not all(choices):
        raise RequestError("at least one choice is needed, and none may be empty")
    return choices


def _lark(source: str) -> str:
    """A rule of GBNF has "::=" behind its name, and no line of Lark begins like that."""
    if not _GBNF_RULE.search(source):
        _check_multiples(source)  # Lark may hold schemas
        for literal in filter(None, _LARK_REGEX.findall(source)):
            _check_repetitions(literal)
        return source
    if source.count("::=") > MAX_GBNF_RULES:
        raise RequestError(f"a GBNF grammar may have {MAX_GBNF_RULES} rules at most")
    try:
        return gbnf_to_lark(_ESCAPE.sub(_plain_escape, source))
    except Exception as error:  # The converter has no error of its own for most of what can be wrong.
        raise RequestError(short(f"GBNF: {error or type(error).__name__}")) from error


def _plain_escape(escape: re.Match[str]) -> str:
    """The converter loses leading zeros of a code point: write the character itself, or a short escape if it is
    ASCII and may mean something."""
    digits = escape[1] or escape[2]
    code = int(digits, 16) if digits else -1
    if code < 0 or code > 0x10FFFF or 0xD800 <= code < 0xE000:
        return escape[0]
    return chr(code) if code >= 0x80 else f"\\x{code:02x}"


def _strings(source: str) -> Iterator[str]:
    """All strings of a JSON text in which something may repeat, as they are meant; nothing of what is no JSON: the
    library refuses that as well."""
    try:
        left: list[object] = [msgspec.json.decode(source)]
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return
    while left:
        value = left.pop()
        if isinstance(value, str):
            if "{" in value:
                yield value
        elif isinstance(value, dict):
            left += [*value.keys(), *value.values()]
        elif isinstance(value, list):
            left += value


def _check_repetitions(pattern: str) -> None:
    if added_by_repetitions(pattern) > MAX_REPEATED:
        raise RequestError(
            f"a regular expression is too costly: repetitions that must be there may add {MAX_REPEATED} characters at"
            " most"
        )


def _check_multiples(source: str) -> None:
    """Bound what all `multipleOf` of a source may cost together: they may meet in one number."""
    together = 1
    for name, number in _NUMBER_MEMBER.findall(source):
        if "\\" not in name and name != '"multipleOf"':
            continue
        try:
            if json.loads(name) != "multipleOf":
                continue
            together = math.lcm(together, _remainders(number))
        except (ValueError, InvalidOperation):
            continue  # No JSON, so the library refuses it as well.
        if together > MAX_REMAINDERS:
            raise RequestError(
                f"'multipleOf' {number[:32]} is too costly: without factors of 2 and 5 the values of a schema may have"
                f" a common multiple of {MAX_REMAINDERS} at most"
            )


def _remainders(number: str) -> int:
    """Return the number's digits as an integer without factors 2 and 5, at most MAX_REMAINDERS + 1; 1 for 0."""
    digits = "".join(map(str, Decimal(number).as_tuple().digits)).rstrip("0")
    if len(digits) > 40:
        return MAX_REMAINDERS + 1
    value = int(digits or "1")
    for factor in (2, 5):
        while value % factor == 0:
            value //= factor
    return min(value, MAX_REMAINDERS + 1)
