"""GGUF files of every architecture, written here with the `gguf` package: transformers' logits, and text as before."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType

from benchmarks.accuracy import reference_logits, relative_difference
from benchmarks.plan_driver import PlanDriver
from engine.errors import ModelError
from engine.loader.gguf import FORMATS, GGUFFile
from engine.loader.gguf_checkpoint import GGUFCheckpoint
from engine.text.tokenizer import TextCodec
from tests.support.decoders import WINDOW, transformers_model, write_decoder
from tests.support.gguf_files import write_gguf
from tests.support.loading import load
from tests.support.tiny_models import CHAT_TEMPLATE, write_tiny_llama

TOKENS = list(range(4, 4 + 3 * WINDOW))
FILES = {
    "llama3 rope": "llama",
    "llama, linear rope": "llama",
    "mistral, windows": "llama",
    "mistral, full": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_gives_the_logits_of_the_directory_it_came_from(tmp_path: Path, name: str) -> None:
    directory, path = write_decoder(tmp_path / "hf", name), tmp_path / "model.gguf"
    write_gguf(directory, path, FILES[name], sentencepiece=name.startswith("mistral"))
    expected = reference_logits(transformers_model(directory), TOKENS)
    loaded = load(path)
    logits = PlanDriver(loaded, num_blocks=16, block_size=16).all_logits(TOKENS, 50)
    assert relative_difference(logits, expected) < 1e-4
    same = load(directory)
    assert loaded.kv_groups == same.kv_groups
    assert loaded.eos_ids == (3,)
    assert loaded.text.chat_template is not None
    assert loaded.assets[loaded.text.chat_template.digest] == CHAT_TEMPLATE.encode()


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of 256 and 512 values, as K types need them."""
    directory = tmp_path_factory.mktemp("wide")
    return write_tiny_llama(directory, hidden_size=256, intermediate_size=512, layers=3, tied=False)


QUANTISED = [GGMLQuantizationType(kind) for kind, layout in FORMATS.items() if layout.name != "F32"]


@pytest.mark.parametrize(
    "weights",
    [*([kind] for kind in QUANTISED), QUANTISED],
    ids=lambda kinds: kinds[0].name if len(kinds) == 1 else "all",
)
def test_quantised_weights_give_the_logits_of_their_values(
    wide: Path, tmp_path: Path, weights: list[GGMLQuantizationType]
) -> None:
    """Every type alone, and then all of them in one file."""
    directory, path = wide, tmp_path / "model.gguf"
    stored = write_gguf(directory, path, "llama", weights=weights)
    with GGUFFile(path) as file:
        found = {entry.format.name for entry in file.tensors.values()}
    assert found == {"F32", *(kind.name for kind in weights)}
    reference = transformers_model(directory)
    exact = reference_logits(reference, TOKENS)
    reference.load_state_dict(stored)
    expected = reference_logits(reference, TOKENS)
    assert relative_difference(expected, exact) > 1e-4  # it was quantised
    logits = PlanDriver(load(path), num_blocks=16, block_size=16).all_logits(TOKENS, len(TOKENS))
    assert relative_difference(logits, expected) < 1e-4


@pytest.mark.parametrize("sentencepiece", [False, True])
def test_the_vocabulary_of_a_file_has_the_directory_s_ids(tmp_path: Path, sentencepiece: bool) -> None:
    directory, path = write_decoder(tmp_path / "hf", "qwen3"), tmp_path / "model.gguf"
    write_gguf(directory, path, "qwen3", sentencepiece=sentencepiece)
    checkpoint = GGUFCheckpoint(path)
    text = "Straße,日本\n"
    ids = TextCodec(checkpoint.text.tokenizer).encode(text, parse_special=True)
    expected = TextCodec((directory / "tokenizer.json").read_bytes()).encode(text, parse_special=True)
    # SentencePiece puts a space before the text, which is three bytes there.
    assert ids[3 if sentencepiece else 0 :] == expected
    assert checkpoint.text.add_bos is sentencepiece
    assert checkpoint.text.special_tokens["eos_token"] == "<|end|>"
    checkpoint.close()


def test_the_architecture_s_missing_tensors_are_named(tmp_path: Path) -> None:
    directory, path = write_decoder(tmp_path / "hf", "qwen2"), tmp_path / "model.gguf"
    write_gguf(directory, path, "qwen3")
    with pytest.raises(ModelError, match=r"tensors are missing, the first is 'model\.layers\.0\.self_attn\.q_norm"):
        load(path)
    assert torch.get_default_dtype() == torch.float32
