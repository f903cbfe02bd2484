"""How much of a prefix a server holds: one call, which also keeps what leads for longer."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from kvstore.object_key import ObjectKey
from kvstore.remote.forgotten import Forgotten
from kvstore.remote.lanes import Pieces, soonest
from kvstore.remote.link import ErrorReplyError, Link, LinkBrokenError
from kvstore.tier import Deadline, Outcome

PROBE_S = 0.05
MAX_REPLY_BYTES = 4096
FIRST_KEYS = 32
"""So many are asked for first: most look-ups find nothing, and those cost little then."""

KEYS_AT_ONCE = 1000
"""A server runs nothing else meanwhile: about a millisecond."""

SCRIPT = b"""
for index, name in ipairs(KEYS) do
  if redis.call('PEXPIRE', name, ARGV[1]) == 0 then return index - 1 end
end
return #KEYS
"""
_SCRIPT_DIGEST = hashlib.sha1(SCRIPT, usedforsecurity=False).hexdigest().encode()

Query = Sequence[ObjectKey]


class Probing:
    """`probe_s` is the longest that one answer may take."""

    def __init__(self, forgotten: Forgotten, ttl_ms: int, probe_s: float) -> None:
        self._forgotten, self._probe_s = forgotten, probe_s
        self._ttl_ms = b"%d" % ttl_ms

    def __call__(self, link: Link, pieces: Pieces[Query], count: int) -> bool | None:
        (job,) = pieces.first(1)
        keys, deadline = job.work, soonest(job.deadline, self._probe_s)
        held = asked = 0
        while held == asked < len(keys):
            names = self._forgotten.names(keys[asked : asked + (KEYS_AT_ONCE if asked else FIRST_KEYS)])
            if not names:
                break
            asked += len(names)
            held += self._leading(link, names, deadline)
        pieces.end(job, Outcome("ok", held))
        return True if asked else None

    def _leading(self, link: Link, names: Sequence[bytes], deadline: Deadline) -> int:
        arguments = (b"%d" % len(names), *names, self._ttl_ms)
        try:
            found = link.call(b"EVALSHA", _SCRIPT_DIGEST, *arguments, deadline=deadline, max_bytes=MAX_REPLY_BYTES)
        except ErrorReplyError as error:
            if error.code != "NOSCRIPT":
                raise
            found = link.call(b"EVAL", SCRIPT, *arguments, deadline=deadline, max_bytes=MAX_REPLY_BYTES)
        if not isinstance(found, int) or not 0 <= found <= len(names):
            raise LinkBrokenError(f"no number of objects: {found!r:.40}")
        return found
