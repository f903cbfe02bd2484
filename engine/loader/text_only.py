"""A model's text without its weights: for processes that speak for engines which have them elsewhere. Imports no torch.

Takes models that the engine itself cannot run: only their tokenizer matters.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from engine.loader import hub
from engine.loader.checkpoint import TextFiles
from engine.loader.gguf import GGUFFile
from engine.loader.gguf_text import gguf_eos_ids, read_gguf_text
from engine.loader.hf_config import sampling_defaults
from engine.loader.hf_text import all_eos_ids, read_text
from engine.loader.json_file import JsonFile
from engine.loader.sources import find_model, source_of
from engine.protocol import AssetRef, TextAssets
from engine.text.tokenizer import TextCodec


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelText:
    """`assets` are the text files by hex SHA-256. `max_positions` is the model's own window, None if it is not told."""

    text: TextAssets
    assets: dict[str, bytes]
    eos_ids: tuple[int, ...]
    vocab_size: int
    max_positions: int | None
    generation_defaults: dict[str, float | int]


def read_model_text(model: str) -> ModelText:
    """Return the text of a directory, a GGUF file, a packaged model or a hub's repository, of which only what belongs
    to text is fetched. Raises ModelError."""
    named = hub.parse(model)
    if named is not None and named.file is None and source_of(model).fetches_from_hub:
        return _of_directory(hub.fetch_text(named))
    found = find_model(model, lambda done, total: None)
    return _of_directory(found.path) if found.path.is_dir() else _of_gguf(found.path, dict(found.generation_defaults))


def text_assets(files: TextFiles, template: bytes | None) -> tuple[TextAssets, dict[str, bytes]]:
    """Return how an engine describes its text, and the bytes by digest. `template` is what is used as one."""
    contents = {hashlib.sha256(data).hexdigest(): data for data in (files.tokenizer, template) if data is not None}
    text = TextAssets(
        tokenizer=_asset(files.tokenizer),
        chat_template=None if template is None else _asset(template),
        bos_id=files.bos_id,
        add_bos=files.add_bos,
        special_tokens=files.special_tokens,
    )
    return text, contents


def _asset(data: bytes) -> AssetRef:
    return AssetRef(hashlib.sha256(data).hexdigest(), len(data))


def _of_directory(directory: Path) -> ModelText:
    config = JsonFile.read(directory / "config.json")
    generation = JsonFile.read_optional(directory / "generation_config.json")
    read = read_text(directory, config)
    told_vocab, told_window = config.values.get("vocab_size"), config.values.get("max_position_embeddings")
    return _model_text(
        read.files, all_eos_ids(config, generation, read), told_vocab, told_window, sampling_defaults(generation)
    )


def _of_gguf(path: Path, generation_defaults: dict[str, float | int]) -> ModelText:
    with GGUFFile(path) as file:
        files, eos_ids, metadata = read_gguf_text(file), gguf_eos_ids(file), file.metadata
    window = metadata.get(f"{metadata.get('general.architecture')}.context_length")
    return _model_text(files, eos_ids, None, window, generation_defaults)


def _model_text(
    files: TextFiles, eos_ids: tuple[int, ...], vocab: object, window: object, defaults: dict[str, float | int]
) -> ModelText:
    text, assets = text_assets(files, files.chat_template)
    codec = TextCodec(files.tokenizer, vocab_size=vocab if isinstance(vocab, int) and 0 < vocab < 2**24 else None)
    return ModelText(
        text=text,
        assets=assets,
        eos_ids=tuple(token for token in eos_ids if 0 <= token < codec.vocab_size),
        vocab_size=codec.vocab_size,
        max_positions=window if isinstance(window, int) and window > 1 else None,
        generation_defaults=defaults,
    )
