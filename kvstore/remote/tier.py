"""The remote tier: a Redis or Valkey server that several replicas share.

A caller never waits for the server. Threads load, save and probe over connections of their own, and one more keeps the
rest in order (kvstore/remote/upkeep.py). Eviction is the server's affair: it keeps what it was told to, for a time to
live that every use renews.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from kvstore.breaker import Breaker
from kvstore.codec import ObjectCodec, PlainCodec
from kvstore.counters import TierCounters
from kvstore.errors import CorruptObjectError, TierUnusableError
from kvstore.object_key import ObjectKey
from kvstore.remote.address import Address, parse_address
from kvstore.remote.bulk import Loading, Piece, Saving
from kvstore.remote.connect import CONNECT_S, Connector
from kvstore.remote.forgotten import Forgotten
from kvstore.remote.lanes import Lane
from kvstore.remote.link import STALL_S
from kvstore.remote.probing import PROBE_S, Probing, Query
from kvstore.remote.server_info import number_in
from kvstore.remote.upkeep import NOT_REACHED, Upkeep
from kvstore.tier import Deadline, EventSink, Outcome, Put, Report, TierName, TierStats, Want
from kvstore.work import Job, Kind, WorkQueue

log = logging.getLogger(__name__)

T = TypeVar("T")

TTL_S = 24 * 3600.0
READERS = min(4, max(2, os.cpu_count() or 2))
"""They copy and check: more of them than there are cores only make others wait."""

WRITERS = 2
MAX_OBJECT_BYTES = 8 << 20
LARGEST_OBJECT_BYTES = 64 << 20
"""More than that may not be allowed: servers refuse 512 MiB, and cut the connection."""

MAX_QUEUED_BYTES = 256 << 20
FIRST_MEETING_S = 1.0


class RemoteTier:
    """Objects as values of the server at `url` (kvstore/remote/address.py), each kept `ttl_s` after its last use unless
    the server evicts it first. Raises TierUnusableError for a URL that is none, and for a server that answers and can
    not be used; one that does not answer is tried again and again.

    Objects above `max_object_bytes` are neither saved nor loaded. `max_queued_bytes` bounds what saves keep waiting;
    more is refused. `connect_s` and `probe_s` bound what their names say, a server that moves no byte for `stall_s`
    is given up, and opening waits `meeting_s` for its first answer. `codec` may encrypt (kvstore/encryption.py).
    """

    def __init__(
        self,
        url: str,
        *,
        ttl_s: float = TTL_S,
        max_object_bytes: int = MAX_OBJECT_BYTES,
        codec: ObjectCodec | None = None,
        on_event: EventSink | None = None,
        readers: int = READERS,
        writers: int = WRITERS,
        max_queued_bytes: int = MAX_QUEUED_BYTES,
        connect_s: float = CONNECT_S,
        probe_s: float = PROBE_S,
        stall_s: float = STALL_S,
        meeting_s: float = FIRST_MEETING_S,
    ) -> None:
        if not 0 < max_object_bytes <= LARGEST_OBJECT_BYTES or ttl_s < 1:
            raise ValueError(f"objects are of 1 to {LARGEST_OBJECT_BYTES} bytes, and kept for a second at least")
        self.name: TierName = "remote"
        self.address = _address(url)
        self._max_object_bytes, self._max_queued_bytes = max_object_bytes, max_queued_bytes
        self._counters = TierCounters()
        self._breakers: dict[Kind, Breaker] = {"load": Breaker(), "save": Breaker()}
        self._bulk, self._probes = WorkQueue[Piece](), WorkQueue[Query]()
        self._forgotten = Forgotten(on_event or (lambda event: None))
        self._connector = Connector(self.address, connect_s=connect_s, stall_s=stall_s)
        ttl_ms, codec = int(ttl_s * 1000), codec or PlainCodec()
        loading = Loading(self._forgotten, codec, ttl_ms, self._condemn)
        saving = Saving(self._forgotten, codec, ttl_ms)
        probing = Probing(self._forgotten, ttl_ms, probe_s)
        load, save = self._breakers["load"], self._breakers["save"]
        runs: list[tuple[str, Callable[[], None]]] = [
            *(("load", Lane("load", self._bulk, load, self._connector, loading).run) for _ in range(readers)),
            *(("save", Lane("save", self._bulk, save, self._connector, saving).run) for _ in range(writers)),
            ("probe", Lane("load", self._probes, load, self._connector, probing, window_pieces=1).run),
            ("watch", lambda: _watch(self._bulk)),
            ("watch", lambda: _watch(self._probes)),
        ]
        self._upkeep = Upkeep(self.address, self._connector, self._forgotten, ttl_ms, stall_s)
        self._threads = [threading.Thread(target=run, name=f"kv-remote-{name}", daemon=True) for name, run in runs]
        for thread in self._threads:
            thread.start()
        self._upkeep.met.wait(meeting_s)
        if self._upkeep.refusal not in ("", NOT_REACHED):
            self.close(Deadline.after(FIRST_MEETING_S))
            raise TierUnusableError(self._upkeep.refusal)

    def probe(self, keys: Sequence[ObjectKey], deadline: Deadline, report: Report) -> None:
        job = Job[Query]("load", keys, lambda outcome, busy_s: report(0, outcome), deadline)
        if not keys:
            report(0, Outcome("ok"))
        elif why := self._why_not("load"):
            report(0, Outcome("refused", detail=why))
        elif not self._probes.put("load", [job]):
            report(0, Outcome("cancelled"))

    def load(self, wants: Sequence[Want], deadline: Deadline, report: Report) -> None:
        why, queued = self._why_not("load"), []
        for index, want in enumerate(wants):
            job = self._load_job(index, want, deadline, report)
            if want.target.nbytes > self._max_object_bytes:
                job.finish(Outcome("refused", detail="the object is too large for this tier"), 0.0)
            elif why:
                job.finish(Outcome("refused", detail=why), 0.0)
            else:
                queued.append(job)
        self._put("load", queued)

    def save(self, puts: Sequence[Put], deadline: Deadline, report: Report) -> None:
        why, (_, queued_bytes) = self._why_not("save"), self._bulk.waiting("save")
        queued = []
        for index, put in enumerate(puts):
            job = self._save_job(index, put, deadline, report)
            queued_bytes += job.size_bytes
            if job.size_bytes > self._max_object_bytes:
                job.finish(Outcome("refused", detail="the object is too large for this tier"), 0.0)
            elif why:
                job.finish(Outcome("refused", detail=why), 0.0)
            elif queued_bytes > self._max_queued_bytes:
                job.finish(Outcome("refused", detail="too much waits to be sent"), 0.0)
            else:
                queued.append(job)
        self._put("save", queued)

    def touch(self, keys: Sequence[ObjectKey]) -> None:
        """Keep each for another time to live."""
        self._upkeep.touch(keys)

    def pin(self, keys: Sequence[ObjectKey], seconds: float) -> int:
        return 0

    def delete(self, keys: Sequence[ObjectKey]) -> None:
        self._forgotten.delete(keys)
        self._upkeep.wake()

    def drop(self, namespace: bytes | None = None, owner: bytes | None = None) -> None:
        """Other processes know of it a few seconds later."""
        self._forgotten.drop((namespace, owner))
        self._upkeep.wake()

    @property
    def refusal(self) -> str:
        """Why the server cannot be used now, "" when it can."""
        return self._upkeep.refusal

    def stats(self) -> TierStats:
        """Bytes are the whole server's, whatever else it keeps."""
        saves, save_bytes = self._bulk.waiting("save")
        return TierStats(
            tier=self.name,
            used_bytes=number_in(self._upkeep.info, "used_memory"),
            capacity_bytes=number_in(self._upkeep.info, "maxmemory"),
            queued_loads=self._bulk.waiting("load")[0],
            queued_saves=saves,
            queued_bytes=save_bytes,
            load_breaker=self._breakers["load"].state,
            save_breaker=self._breakers["save"].state,
            breaker_trips_total=sum(breaker.trips for breaker in self._breakers.values()),
            unindexed=True,
            **self._counters.fields(),
        )

    def close(self, deadline: Deadline) -> None:
        self._bulk.close()
        self._probes.close()
        _empty(self._bulk, deadline)
        _empty(self._probes, deadline)
        self._upkeep.close(deadline)
        # A socket can always be left, so that nothing of ours is used after this.
        self._connector.abort_all()
        for thread in self._threads:
            thread.join()

    def _why_not(self, kind: Kind) -> str:
        """Return why nothing of the kind need be tried now, "" when it may."""
        if self._breakers[kind].shut:
            return "the breaker is open"
        return self._upkeep.refusal

    def _put(self, kind: Kind, jobs: Sequence[Job[Piece]]) -> None:
        if jobs and not self._bulk.put(kind, jobs):
            for job in jobs:
                job.finish(Outcome("cancelled"), 0.0)

    def _load_job(self, index: int, want: Want, deadline: Deadline, report: Report) -> Job[Piece]:
        def finish(outcome: Outcome, busy_s: float) -> None:
            self._counters.loaded(outcome, busy_s)
            report(index, outcome)

        return Job("load", Piece(want.key, (want.target,)), finish, deadline, want.target.nbytes)

    def _save_job(self, index: int, put: Put, deadline: Deadline, report: Report) -> Job[Piece]:
        def finish(outcome: Outcome, busy_s: float) -> None:
            self._counters.saved(outcome, busy_s)
            report(index, outcome)

        return Job("save", Piece(put.key, put.parts), finish, deadline, put.size_bytes)

    def _condemn(self, key: ObjectKey, error: CorruptObjectError) -> None:
        self._counters.corrupt(error.fault)
        log.warning("an object on %s is corrupt (%s) and is deleted: %s", self.address, error, key.leaf)
        self.delete([key])


def _address(url: str) -> Address:
    try:
        return parse_address(url)
    except ValueError as error:
        raise TierUnusableError(str(error)) from None


def _empty(queue: WorkQueue[T], deadline: Deadline) -> None:
    queue.wait_idle(deadline)
    for job in queue.cancel():
        job.finish(Outcome("cancelled"), 0.0)


def _watch(queue: WorkQueue[T]) -> None:
    """Report what waited past its deadline. What runs ends at its own."""
    pause = threading.Event()
    while queue.wait_busy():
        late, _ = queue.expire()
        for job in late:
            job.finish(Outcome("late"), 0.0)
        pause.wait(0.05)
