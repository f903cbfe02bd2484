"""Where the text of a model comes from whose engines are of other makes: a setting, or an engine of ours beside them.

Servers of other makes do not serve their tokenizer, and text is made here from token ids.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass

from engine.errors import HeadraceError, ModelError, RequestError
from engine.loader.text_only import ModelText, read_model_text
from engine.protocol import Engine, EngineInfo
from engine.text.tokenizer import TextCodec
from server.foreign.facts import PROBE_TEXTS, Probe
from server.foreign.settings import ANY

log = logging.getLogger("headrace.fleet")

READ_AGAIN_S = 30.0


@dataclass(frozen=True)
class PoolText:
    """`probe` is what the tokenizer makes of `PROBE_TEXTS`; `block_size` that of ours beside them."""

    model: ModelText
    probe: Probe
    block_size: int | None = None


class Texts:
    """`sources` are what models' tokenizers are read from, by model. `on_change` is called when one more is known."""

    def __init__(self, sources: Mapping[str, str], on_change: Callable[[], None]) -> None:
        self._sources = sources
        self._on_change = on_change
        self._known: dict[str, PoolText] = {}
        self._begun: dict[str, asyncio.Task[None]] = {}

    def get(self, model: str) -> PoolText | None:
        return self._known.get(model)

    def has_source(self, model: str) -> bool:
        return model in self._sources or ANY in self._sources

    def want(self, model: str) -> None:
        """Begin to read what a setting names for it, if one does."""
        source = self._sources.get(model) or self._sources.get(ANY)
        if source is not None:
            self._begin(model, self._read(model, source))

    def offer(self, model: str, engine: Engine, info: EngineInfo) -> None:
        """Take the text of an engine of ours, unless a setting names another."""
        if not self.has_source(model):
            self._begin(model, self._fetch(model, engine, info))

    async def close(self) -> None:
        for task in self._begun.values():
            task.cancel()
        if self._begun:
            await asyncio.wait(self._begun.values())

    def _begin(self, model: str, work: Coroutine[object, object, None]) -> None:
        if model in self._begun:
            work.close()
        else:
            self._begun[model] = asyncio.create_task(work)

    async def _read(self, model: str, source: str) -> None:
        """Read until it can be used: a hub may be away, a file may come."""
        while model not in self._known:
            try:
                self._note(model, await asyncio.to_thread(_read_probed, source))
            except HeadraceError as error:
                log.error("the tokenizer of %s cannot be used: %s", model, error)
                await asyncio.sleep(READ_AGAIN_S)

    async def _fetch(self, model: str, engine: Engine, info: EngineInfo) -> None:
        try:
            references = [info.text.tokenizer, *filter(None, [info.text.chat_template])]
            assets = {reference.digest: await engine.fetch_asset(reference.digest) for reference in references}
            known = ModelText(
                text=info.text,
                assets=assets,
                eos_ids=info.eos_ids,
                vocab_size=info.vocab_size,
                max_positions=info.max_model_len,
                generation_defaults=info.generation_defaults,
            )
            self._note(model, await asyncio.to_thread(_probed, known, info.block_size))
        except HeadraceError as error:
            log.info("the text of %s could not be fetched: %s", model, error)
            del self._begun[model]  # the engine is gone: its successor is asked

    def _note(self, model: str, text: PoolText) -> None:
        self._known[model] = text
        self._on_change()


def _read_probed(source: str) -> PoolText:
    return _probed(read_model_text(source), None)


def _probed(model: ModelText, block_size: int | None) -> PoolText:
    """Raises ModelError."""
    codec = TextCodec.from_assets(model.text, model.assets, vocab_size=model.vocab_size)
    try:
        probe = tuple(tuple(codec.encode(text, parse_special=True)) for text in PROBE_TEXTS)
    except RequestError as error:
        raise ModelError(str(error)) from error
    return PoolText(model, probe, block_size)
