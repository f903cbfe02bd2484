"""A model's text without its weights: the same as the engine reads beside them."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.errors import ModelError
from engine.loader.hub import HubModel, fetch_text
from engine.loader.load import open_checkpoint
from engine.loader.packaged import ensure
from engine.loader.text_only import read_model_text
from tests.support import smollm2
from tests.support.hub_server import hub_server
from tests.support.tiny_models import VOCAB_SIZE, write_tiny_llama


def test_a_directory_needs_no_weights(tmp_path: Path) -> None:
    directory = write_tiny_llama(tmp_path)
    checkpoint = open_checkpoint(str(directory))
    (directory / "model.safetensors").unlink()
    read = read_model_text(str(directory))
    assert read.assets[read.text.tokenizer.digest] == checkpoint.text.tokenizer
    assert read.text.chat_template is not None
    assert read.assets[read.text.chat_template.digest] == checkpoint.text.chat_template
    assert (read.text.bos_id, read.text.add_bos) == (checkpoint.text.bos_id, checkpoint.text.add_bos)
    assert (read.eos_ids, read.vocab_size, read.max_positions) == (checkpoint.eos_ids, VOCAB_SIZE, 512)
    assert read.generation_defaults == checkpoint.generation_defaults
    checkpoint.close()


def test_a_gguf_file_has_its_text_with_it() -> None:
    for name in ("smollm2", str(ensure("smollm2"))):
        read = read_model_text(name)
        assert read.assets[read.text.tokenizer.digest] == smollm2.tokenizer_bytes()
        assert (read.vocab_size, read.max_positions) == (49152, 8192)


def test_of_a_hub_no_weights_are_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = write_tiny_llama(tmp_path / "files")
    with hub_server() as hub:
        hub.add("org/tiny", files)
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        directory = fetch_text(HubModel("org/tiny"), tmp_path / "cache")
        again = fetch_text(HubModel("org/tiny"), tmp_path / "cache")
    assert again == directory
    assert not list(directory.glob("*.safetensors"))
    assert read_model_text(str(directory)).text == read_model_text(str(files)).text
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    assert fetch_text(HubModel("org/tiny"), tmp_path / "cache") == directory


def test_what_is_no_model_is_told(tmp_path: Path) -> None:
    with pytest.raises(ModelError):
        read_model_text(str(tmp_path))
    with pytest.raises(ModelError):
        read_model_text("/does/not/exist")
