"""Stop strings as one automaton, compiled once per set and shared by every stream that uses it.

Aho and Corasick, "Efficient string matching", CACM 18(6), 1975. A stream's position is one integer, its state: the
longest suffix of the text so far that begins some stop string. Knows characters only, neither tokens nor streams.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence

import msgspec

from engine.errors import RequestError

ROOT = 0

_MAX_CHARACTERS = 65_536
"""Over all strings of a set. A state takes a few hundred bytes, so this bounds what one request can make us hold."""


class Match(msgspec.Struct, frozen=True):
    """A stop string ends before index `end` of the scanned piece."""

    string: str
    end: int


class StopStrings:
    """The match that is complete first wins; of several that end at the same character, the longest.

    So the result is a property of the text, not of how it was cut into tokens, and generation stops at the first
    character at which it can.
    """

    def __init__(self, strings: Sequence[str], *, param: str = "stop") -> None:
        """Raises RequestError naming `param` for an empty string and for too much text."""
        if not strings or not all(strings):
            raise RequestError("A stop string must not be empty.", param=param, value=list(strings))
        if sum(map(len, strings)) > _MAX_CHARACTERS:
            raise RequestError(f"The stop strings have more than {_MAX_CHARACTERS} characters in all.", param=param)
        self.strings = tuple(dict.fromkeys(strings))
        self._next: list[dict[str, int]] = [{}]
        self._fail: list[int] = [ROOT]
        self._match: list[str | None] = [None]
        self._held: list[int] = [0]
        self._build()
        # Most text is far from any stop string: from the root, a regular expression finds the next possible start.
        self._first = re.compile("[" + "".join(map(re.escape, self._next[ROOT])) + "]").search

    def held(self, state: int) -> int:
        """How many characters at the end of the text may still become part of a match."""
        return self._held[state]

    def scan(self, state: int, piece: str) -> tuple[int, Match | None]:
        """Go on from `state` over `piece`; return the state behind the first match or, without one, behind it all."""
        step, fail, matches = self._next, self._fail, self._match
        at, size = 0, len(piece)
        while at < size:
            if state == ROOT:
                start = self._first(piece, at)
                if start is None:
                    return ROOT, None
                at = start.start()
            char = piece[at]
            while state != ROOT and char not in step[state]:
                state = fail[state]
            state = step[state].get(char, ROOT)
            at += 1
            string = matches[state]
            if string is not None:
                return state, Match(string, at)
        return state, None

    def _build(self) -> None:
        for string in self.strings:
            state = ROOT
            for char in string:
                if char not in self._next[state]:
                    self._next[state][char] = len(self._next)
                    self._next.append({})
                    self._fail.append(ROOT)
                    self._match.append(None)
                    self._held.append(self._held[state] + 1)  # The depth, until _link corrects it.
                state = self._next[state][char]
            self._match[state] = string
        self._link()

    def _link(self) -> None:
        """Breadth first, so that a state's failure state, which is shallower, is complete when it is used."""
        queue = deque(self._next[ROOT].values())
        order: list[int] = []
        while queue:
            state = queue.popleft()
            order.append(state)
            for char, child in self._next[state].items():
                fallback = self._fail[state]
                while fallback != ROOT and char not in self._next[fallback]:
                    fallback = self._fail[fallback]
                self._fail[child] = self._next[fallback].get(char, ROOT)
                queue.append(child)
        for state in order:
            fallback = self._fail[state]
            # The state's own string, if it has one, is the longest that ends here.
            if self._match[state] is None:
                self._match[state] = self._match[fallback]
            # Nothing continues a leaf: only a shorter suffix of it can begin another match.
            if not self._next[state]:
                self._held[state] = self._held[fallback]
