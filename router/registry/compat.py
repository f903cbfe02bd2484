"""Who may serve whom: workers that continue each other's requests must agree on more than a name.

Two workers are compatible when the same token ids mean the same text to both and the same next token: model, weights,
arithmetic type, block size (their KV is shared by blocks), tokenizer, and what the chat template makes of a
conversation. All of it is one digest, which a worker announces with its record.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence

import msgspec

from engine.protocol import EngineInfo
from router.registry.base import WorkerRecord

log = logging.getLogger("headrace.registry")

MAX_REMEMBERED_REFUSALS = 10_000

PROBE_CHATS: tuple[tuple[dict[str, str], ...], ...] = (
    ({"role": "user", "content": "Hello"},),
    ({"role": "system", "content": "Be brief."}, {"role": "user", "content": " 1 + 1 = ?\n"}),
    (
        {"role": "user", "content": "Who wrote Faust?"},
        {"role": "assistant", "content": "Goethe."},
        {"role": "user", "content": "When? \u00e9\u4e2d\U0001f642"},
    ),
)
"""Conversations that every worker of a model must turn into the same token ids, with a generation prompt behind them.
What a template refuses counts as no ids."""


def probe_digest(token_ids: Sequence[Sequence[int]]) -> str:
    """Return the digest of what a template and a tokenizer made of `PROBE_CHATS`."""
    return hashlib.sha256(msgspec.json.encode([list(ids) for ids in token_ids])).hexdigest()


def compatibility_digest(info: EngineInfo, template_probe: str | None = None) -> str:
    """Return the digest that a worker announces.

    `template_probe` is the `probe_digest` of what it makes of chats. Without one the template's own text is taken,
    which is stricter: two templates that differ in a comment are different then.
    """
    template = info.text.chat_template
    parts = {
        "architecture": info.architecture,
        "weights": info.weights_digest,
        "dtype": info.dtype,
        "block_size": info.block_size,
        "tokenizer": info.text.tokenizer.digest,
        "template": template_probe or ("" if template is None else template.digest),
        "bos": info.text.bos_id if info.text.add_bos else None,
        "eos": sorted(info.eos_ids),
    }
    return hashlib.sha256(msgspec.json.encode(parts, order="sorted")).hexdigest()


class CompatibilityGate:
    """Passes on the workers that may serve. For each model the first ready one sets the digest, unless it is
    `configured`.

    A digest that no listed worker has any more is given up: after a model was exchanged the next ready worker sets it.
    """

    def __init__(self, configured: Mapping[str, str] | None = None) -> None:
        self._configured = dict(configured or {})
        self._digests: dict[str, str] = {}
        self._told: set[tuple[str, str, str]] = set()

    def expected(self, model: str) -> str | None:
        """Return the digest that a model's workers must have, None while nothing has set it."""
        return self._configured.get(model) or self._digests.get(model)

    def admit(self, records: Sequence[WorkerRecord]) -> tuple[WorkerRecord, ...]:
        """Return the records of a whole list that may serve. Workers that still start may not know their digest."""
        self._forget(records)
        for record in records:
            if record.state == "ready" and record.compatibility and self.expected(record.model) is None:
                self._digests[record.model] = record.compatibility
        return tuple(record for record in records if self._fits(record))

    def _forget(self, records: Sequence[WorkerRecord]) -> None:
        listed = {(record.model, record.compatibility) for record in records if record.state != "dead"}
        self._digests = {model: digest for model, digest in self._digests.items() if (model, digest) in listed}

    def _fits(self, record: WorkerRecord) -> bool:
        expected = self.expected(record.model)
        if not record.compatibility:
            if record.state in ("starting", "dead"):
                return True
            return self._refuse(record, expected or "any")
        if expected is None or record.compatibility == expected:
            return True
        return self._refuse(record, expected)

    def _refuse(self, record: WorkerRecord, expected: str) -> bool:
        about = (record.worker_id, record.incarnation, expected)
        if about not in self._told:
            if len(self._told) >= MAX_REMEMBERED_REFUSALS:
                self._told.clear()
            self._told.add(about)
            log.warning(
                "worker %s may not serve %s: its compatibility digest is %s, the others' is %s",
                record.worker_id,
                record.model,
                record.compatibility or "missing",
                expected,
            )
        return False
