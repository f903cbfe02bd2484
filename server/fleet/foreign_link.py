"""The connection to one worker of another make, and what has been learnt of its server. It lives as long as its
address."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

import msgspec

from engine.protocol import EngineInfo, GenerateRequest
from kvstore.manager.figures import StoreStats
from router.registry.base import RankAddress, WorkerRecord
from server.fleet.link import EventsPlace, streams_ended, target_id
from server.foreign.facts import Probe, ServerFacts, learn
from server.foreign.gate import foreign_digest
from server.foreign.info import NO_TEXT, foreign_info
from server.foreign.registry import detect, dialect_named
from server.foreign.texts import PoolText
from server.foreign.worker import OpenAIWorker

ASK_AGAIN_S = 1.0
DEFAULT_BLOCK_SIZE = 64
DEFAULT_WINDOW = 4096
"""Where neither the server nor the model's files tell one."""


class ForeignLink:
    """A `Target`. `on_change(link, is_new_process)` is called whenever the server's state or what is known of it
    changes, and at first. `facts` are of the server's present life, None until it has told them."""

    dp_rank = 0
    tells_tokens = False
    kv_store: StoreStats | None = None

    def __init__(
        self,
        record: WorkerRecord,
        on_change: Callable[[ForeignLink, bool], None],
        *,
        api_key: str | None,
        health_interval_s: float,
    ) -> None:
        assert record.http_url is not None, "such a record is refused by router/registry/records.py"
        self.record = record
        self.target_id = target_id(record.worker_id, self.dp_rank)
        self.facts: ServerFacts | None = None
        self.engine = OpenAIWorker(record.http_url, api_key=api_key, health_interval_s=health_interval_s)
        self._on_change = on_change
        self._tasks: list[asyncio.Task[None]] = []

    def leads_to(self, record: WorkerRecord, rank: RankAddress | None) -> bool:
        """Whether it is the connection that a record asks for."""
        same_state = msgspec.structs.replace(record, state=self.record.state)
        return rank is None and same_state == self.record

    @property
    def info(self) -> EngineInfo | None:
        return self.engine.state().info

    @property
    def probe(self) -> Probe | None:
        return None if self.facts is None else self.facts.probe

    @property
    def digest(self) -> str | None:
        return None if self.facts is None else foreign_digest(self.record.model, self.facts.probe)

    @property
    def events(self) -> EventsPlace | None:
        if self.record.events is None:
            return None
        return EventsPlace(
            self.record.events, self.record.events_replay, is_foreign=True, topic=self.record.events_topic
        )

    def takes(self, request: GenerateRequest) -> bool:
        return self.engine.takes(request)

    def open(self) -> None:
        self.engine.open()
        self._tasks = [asyncio.create_task(self._follow()), asyncio.create_task(self._learn())]

    async def close(self) -> None:
        """Its streams end with EngineDiedError."""
        for task in self._tasks:
            task.cancel()
        await self.engine.close()

    async def retire(self) -> None:
        for task in self._tasks:
            task.cancel()
        try:
            await streams_ended(self.engine)
        finally:
            await self.engine.close()

    def serve(self, text: PoolText | None) -> None:
        """The server may serve, with the text of its model, None for a text relay."""
        facts, model = self.facts, self.record.model
        if facts is None or self.engine.serves:
            return
        if text is None:
            window = facts.max_model_len or 0
            info = foreign_info(model, facts.dialect, NO_TEXT, max_model_len=window, vocab_size=0, eos_ids=())
            self.engine.serve(None, info, {})
            return
        info = foreign_info(
            model,
            facts.dialect,
            text.model.text,
            max_model_len=facts.max_model_len or text.model.max_positions or DEFAULT_WINDOW,
            vocab_size=text.model.vocab_size,
            eos_ids=text.model.eos_ids,
            block_size=facts.block_size or text.block_size or DEFAULT_BLOCK_SIZE,
            generation_defaults=text.model.generation_defaults,
        )
        self.engine.serve(dialect_named(facts.dialect), info, text.model.assets)

    async def _follow(self) -> None:
        while True:
            self._on_change(self, False)
            await self.engine.wait_changed()

    async def _learn(self) -> None:
        """Ask the server what it is, in each of its lives anew: it may have come back as another one."""
        import aiohttp

        watch, known_life = self.engine.watch, 0
        while True:
            while watch.health not in ("well", "draining") or watch.lives == known_life:
                await self.engine.wait_changed()
            life = watch.lives
            if known_life:
                self.facts, watch.load_reader = None, None
                self.engine.withdraw()
            try:
                facts = await self._ask()
            except (aiohttp.ClientError, TimeoutError, OSError):
                with suppress(TimeoutError):
                    async with asyncio.timeout(ASK_AGAIN_S):
                        await self.engine.wait_changed()
                continue
            self.facts, watch.load_reader = facts, facts.load_reader
            self._on_change(self, known_life > 0)
            known_life = life

    async def _ask(self) -> ServerFacts:
        session, url, model = self.engine.session, self.engine.url, self.record.model
        dialect = self.record.dialect
        if dialect == "auto":
            dialect = await detect(session, url, model)
        return await learn(session, url, model, dialect)
