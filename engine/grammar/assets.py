"""A grammar pool for a served model: its vocabulary comes from the text assets, when the first grammar is asked for."""

from __future__ import annotations

from collections.abc import Mapping

from engine.grammar.base import Vocabulary
from engine.grammar.pool import GrammarPool
from engine.protocol import EngineInfo
from engine.text.tokenizer import TextCodec


def pool_for(info: EngineInfo, assets: Mapping[str, bytes]) -> GrammarPool:
    """`assets` are the bytes of `info.text` by digest."""

    def vocabulary() -> Vocabulary:
        codec = TextCodec.from_assets(info.text, assets, vocab_size=info.vocab_size)
        return Vocabulary.of(codec, info.vocab_size, info.eos_ids)

    return GrammarPool(vocabulary)
