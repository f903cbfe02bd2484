"""The KV store as the engine's KVPort: between the engine's words for requests and blocks and the store's.

Prompt blocks are handed over as they become full. Those of the output wait for the end of the turn: what lies behind a
stop string is known only then, and is not stored. Knows no tiers and no devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from engine.protocol import FullBlock, HoldDone, LoadDone, LoadPlan
from kvstore.manager.contract import Loaded, StoreClient, StoredBlock


@dataclass(slots=True)
class _Asked:
    """A request between its look-up and its end. `later` are blocks of its output."""

    scope: bytes
    prompt_blocks: int
    saves: bool
    later: list[StoredBlock] = field(default_factory=list)


class StorePort:
    """`slides` says that the model has sliding windows: blocks of its output are not stored then, since the window has
    passed most of them when the turn ends."""

    def __init__(self, client: StoreClient, block_size: int, *, slides: bool) -> None:
        self._client, self._block_size, self._slides = client, block_size, slides
        self._asked: dict[str, _Asked] = {}

    def look_up(
        self, request_id: str, scope: bytes, keys: Sequence[bytes], start_block: int, *, save: bool = True
    ) -> None:
        self._asked[request_id] = _Asked(scope, len(keys), save)
        self._client.look_up(request_id, scope, keys, start_block, save=save)

    def match(self, request_id: str, keys: Sequence[bytes], start_block: int) -> LoadPlan | Literal["later"] | None:
        found = self._client.found(request_id, start_block, len(keys))
        if found is None:
            return "later"
        if not found.tiers:
            return None
        stop = start_block + len(found.tiers)
        return LoadPlan(
            request_id=request_id, start_block=start_block, keys=tuple(keys[start_block:stop]), tiers=found.tiers
        )

    def start_load(self, plan: LoadPlan, block_ids: Sequence[Sequence[int]]) -> None:
        self._client.load(plan.request_id, plan.start_block, block_ids)

    def poll(self) -> Sequence[LoadDone | HoldDone]:
        return [
            LoadDone(request_id=one.request_id, loaded_blocks=one.blocks, error=one.error)
            if isinstance(one, Loaded)
            else HoldDone(request_id=one.request_id)
            for one in self._client.poll()
        ]

    def on_full(self, blocks: Sequence[FullBlock]) -> None:
        now: list[StoredBlock] = []
        for block in blocks:
            asked = self._asked[block.request_id]
            if not asked.saves:
                continue
            stored = StoredBlock(
                block.request_id, asked.scope, block.index, block.key, block.parent, block.token_ids, block.block_ids
            )
            if block.index < asked.prompt_blocks:
                now.append(stored)
            elif not self._slides:
                asked.later.append(stored)
        if now:
            self._client.save(now)

    def on_finish(self, request_id: str, keep_tokens: int) -> Literal["free", "hold"]:
        asked = self._asked.pop(request_id)
        keep_blocks = keep_tokens // self._block_size
        later = [block for block in asked.later if block.index < keep_blocks]
        if later:
            self._client.save(later)
        return "hold" if self._client.finish(request_id, keep_blocks) else "free"

    def observe_prefill(self, tokens: int, seconds: float) -> None:
        self._client.observe_prefill(tokens, seconds)

    def layer_done(self, step: int, layer: int) -> None:
        """Loads end before their request runs: nothing waits for a layer."""
