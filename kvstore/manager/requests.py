"""What a client knows of one request, from its look-up to its end."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvstore.keys import owner_of
from kvstore.manager.looking import Look
from kvstore.manager.parts import BlockParts


@dataclass(slots=True, eq=False)
class KnownRequest:
    """`parts` are those of the namespace in which it began: what it saves belongs there. `unread` counts its blocks
    that wait to be read or are being read; `keep_blocks` is known when it has ended."""

    request_id: str
    scope: bytes
    parts: BlockParts
    saves: bool = True
    look: Look | None = None
    keys: list[bytes] = field(default_factory=list)
    unread: int = 0
    keep_blocks: int | None = None

    @property
    def owner(self) -> bytes:
        return owner_of(self.scope)
