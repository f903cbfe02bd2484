"""How long a regular expression is when its repetitions are written out. Knows no dialect: an estimate, for a bound.

The library counts a repetition down one by one, and its masks take time and memory in proportion: (abc){100000} costs
half a second a token, which every other request of the step waits for. Repetitions that need not happen are free.
"""

from __future__ import annotations

import re

_COUNT = re.compile(r"\{([0-9]+)(?:,[0-9]*)?\}")
_CLASS = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)
_ESCAPE = re.compile(r"\\(?:[pPxuU]\{[^}]{0,64}\}|.)", re.DOTALL)
_MOST = 10**9


def added_by_repetitions(pattern: str) -> int:
    """Return by how many characters the longest alternative grows when each part stands there as often as it must. A
    text in which nothing repeats need not be an expression, and grows by nothing."""
    return _written_out(pattern) - _written_out(_COUNT.sub("", pattern))


def _written_out(pattern: str) -> int:
    """Return the characters of the longest alternative, at most a billion."""
    outer: list[tuple[int, int]] = []
    longest = before = part = 0  # of the group's alternatives, of the present one, of what a count would repeat
    at, has_classes = 0, True
    while at < len(pattern):
        letter = pattern[at]
        whole = _ESCAPE.match(pattern, at) if letter == "\\" else None
        if letter == "[" and has_classes:
            whole = _CLASS.match(pattern, at)
            has_classes = whole is not None  # one without an end: those that begin within it have none either
        count = _COUNT.match(pattern, at) if letter == "{" else None
        if count is not None:
            part = min(part * _number(count[1]), _MOST)
        elif letter == "(":
            outer.append((longest, before + part))
            longest = before = part = 0
        elif letter == ")" and outer:
            part = max(longest, before + part)
            longest, before = outer.pop()
        elif letter == "|":
            longest, before, part = max(longest, before + part), 0, 0
        elif letter not in "*+?^$":
            before, part = min(before + part, _MOST), 1
        match = whole or count
        at = at + 1 if match is None else match.end()
    return max(longest, before + part)


def _number(digits: str) -> int:
    return max(1, int(digits)) if len(digits) < 10 else _MOST
