"""An API process and an engine that say they are ready have done what the first grammar would wait for."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.grammar import registry
from engine.grammar.base import Backend, Vocabulary
from engine.protocol import Grammar
from server.core_process import load_engine
from server.text_service import TextService
from tests.support.fake_engine import FakeEngine
from tests.support.tiny_models import write_tiny_llama


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the vocabularies that a back end was opened for."""
    sizes: list[int] = []
    plain = registry.BACKENDS[registry.DEFAULT]

    def counted(vocabulary: Vocabulary) -> Backend:
        sizes.append(len(vocabulary.tokens))
        return plain(vocabulary)

    monkeypatch.setitem(registry.BACKENDS, registry.DEFAULT, counted)
    return sizes


async def test_an_open_text_service_is_warm(opened: list[int]) -> None:
    engine = FakeEngine()
    service = await TextService.open(engine, engine.info)
    try:
        assert opened == [engine.info.vocab_size]
        await service.compile(Grammar("regex", "[0-9]"))
        assert opened == [engine.info.vocab_size]
    finally:
        service.close()


async def test_a_model_that_takes_no_grammars_is_served_all_the_same(opened: list[int]) -> None:
    engine = FakeEngine(eos_ids=())
    service = await TextService.open(engine, engine.info)
    try:
        assert await service.prompts_ids(["a"], add_special_tokens=False)
    finally:
        service.close()


def test_a_loaded_engine_is_warm(tmp_path: Path, opened: list[int]) -> None:
    model = write_tiny_llama(tmp_path / "model")
    engine = load_engine(
        EngineConfig(model=str(model), device="cpu", threads=1, kv_cache_memory_bytes=8 << 20), lambda done, phase: None
    )
    try:
        assert opened == [engine.info.vocab_size]
    finally:
        engine.close()
