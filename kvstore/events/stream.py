"""The reader's end of an event stream as a state machine: what may be applied, and what must be asked for first.

Knows numbers, epochs and digests; no sockets and no time. The rule: a view is right as of one number of one epoch. The
next number brings it forward, an older one is old news, and anything else shows that something is missing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

from kvstore.events.digest import Digest
from kvstore.events.media import MEDIUM_OF, Tier
from kvstore.events.messages import Event, EventBatch

Need = Literal["replay", "dump"]


class View(Protocol):
    """Where events end up."""

    def apply(self, events: Sequence[Event]) -> None: ...

    def clear(self) -> None:
        """Nothing is held, or nothing is known."""
        ...

    def digest(self) -> Mapping[Tier, Digest]:
        """Return the digests of what is held. Empty tiers may be missing."""
        ...


class EventStream:
    """`need` is what has to be asked for before anything more is applied; None while the view is up to date."""

    def __init__(self, view: View) -> None:
        self.need: Need | None = "dump"
        self.epoch = 0
        self.next_number = 0
        self.counters = {"gaps": 0, "epochs": 0, "digest_mismatches": 0, "replayed": 0, "dumps": 0}
        self._view = view
        self._anywhere = self._replayed = False
        self._ts = 0.0

    def offer(self, number: int, batch: EventBatch) -> None:
        """Take a batch that was published. While something is needed it is left out: the answer covers it."""
        if self.need is not None:
            return
        if self._anywhere:
            self._anywhere = False
            self.epoch, self.next_number = batch.epoch, number
        if batch.epoch != self.epoch or self._began_again(number, batch):
            self.counters["epochs"] += 1
            self._view.clear()
            self.need = "dump"
        elif number == self.next_number:
            self._apply(number, batch)
        elif number > self.next_number:
            self.counters["gaps"] += 1
            self.need = "replay"

    def replay(self, number: int, batch: EventBatch) -> None:
        """Take the next batch of a replay from `next_number` on. If it leaves out anything only a dump can help."""
        if self.need != "replay":
            return
        if number != self.next_number or batch.epoch != self.epoch:
            self.need = "dump"
            return
        self.counters["replayed"] += 1
        self._replayed = True
        self._apply(number, batch)

    def end_replay(self) -> None:
        """The replay is over. Without any batch, though a later one is known, the publisher is another one."""
        if self.need == "replay":
            self.need = None if self._replayed else "dump"
        self._replayed = False

    def end_dump(self, epoch: int, number: int) -> None:
        """The view has all that was held as of batch `number` of `epoch`."""
        self.epoch, self.next_number = epoch, number + 1
        self.counters["dumps"] += 1
        self.need = None

    def begin_anywhere(self) -> None:
        """Go on with whatever comes next, knowing nothing of what was before: for publishers that cannot dump."""
        self._view.clear()
        self._anywhere = True
        self.need = None

    def check(self, number: int, batch: EventBatch) -> None:
        """Compare digests, if they are of the state that the view has."""
        if self.need is None and batch.epoch == self.epoch and number + 1 == self.next_number:
            self._compare(batch)

    def _began_again(self, number: int, batch: EventBatch) -> bool:
        # Without epochs only the time tells a publisher that counts anew from what is read for the second time.
        return batch.epoch == 0 and number < self.next_number and batch.ts > self._ts

    def _apply(self, number: int, batch: EventBatch) -> None:
        self._view.apply(batch.events)
        self.next_number, self._ts = number + 1, batch.ts
        self._compare(batch)

    def _compare(self, batch: EventBatch) -> None:
        if batch.digests is None:
            return
        ours = {MEDIUM_OF[tier]: digest for tier, digest in self._view.digest().items() if digest.count}
        theirs = {medium: digest for medium, digest in batch.digests.items() if digest.count}
        if ours != theirs:
            self.counters["digest_mismatches"] += 1
            self.need = "dump"
