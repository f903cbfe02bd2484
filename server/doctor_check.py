"""What `headrace doctor` says of one thing."""

from __future__ import annotations

from typing import Literal

import msgspec


class Check(msgspec.Struct, frozen=True):
    """`bad` means that a server does not start or does not work."""

    name: str
    state: Literal["good", "note", "bad"]
    text: str
    hint: str | None = None
