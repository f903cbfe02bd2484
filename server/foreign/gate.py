"""Which servers of other makes may serve a model together: what can be known of them is its name and its tokenizer.

Weights are not known: whoever writes a record vouches for them.
"""

from __future__ import annotations

import hashlib
import logging

import msgspec

from router.registry.base import WorkerRecord
from server.foreign.facts import Probe, ServerFacts

log = logging.getLogger("headrace.registry")

MAX_REMEMBERED_REFUSALS = 10_000

NAMED_IN_REQUESTS = ("openai", "text")
"""Dialects whose requests name the model. The others serve whatever they have loaded."""


def foreign_digest(model: str, probe: Probe | None) -> str:
    """Return the digest of what is known of such a worker."""
    return hashlib.sha256(msgspec.json.encode([model, probe])).hexdigest()


class ForeignGate:
    """Says of each refusal why, once."""

    def __init__(self) -> None:
        self._told: set[tuple[str, str]] = set()

    def admits(self, record: WorkerRecord, facts: ServerFacts, expected: Probe | None, *, relayed: bool) -> bool:
        """Whether a worker may serve in a pool. `expected` is what the model's tokenizer makes of the probe texts, None
        where nobody knows; `relayed` says that the pool passes text on."""
        model = record.model
        if relayed != (facts.dialect == "text"):
            kinds = ("text only", "token ids") if facts.dialect == "text" else ("token ids", "text only")
            return self._refuse(record, "it gives {}, the others of its model {}".format(*kinds))
        if facts.dialect in NAMED_IN_REQUESTS and facts.models and model not in facts.models:
            return self._refuse(record, f"it serves {', '.join(facts.models[:8])!r} and not {model!r}")
        if facts.probe is not None and expected is not None and facts.probe != expected:
            own, others = foreign_digest(model, facts.probe), foreign_digest(model, expected)
            return self._refuse(
                record, f"it splits text into other tokens: its compatibility digest is {own}, the others' is {others}"
            )
        return True

    def _refuse(self, record: WorkerRecord, reason: str) -> bool:
        about = (record.worker_id, reason)
        if about not in self._told:
            if len(self._told) >= MAX_REMEMBERED_REFUSALS:
                self._told.clear()
            self._told.add(about)
            log.warning("worker %s may not serve %s: %s", record.worker_id, record.model, reason)
        return False
