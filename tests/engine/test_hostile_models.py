"""Model files of anybody: whatever a value is, the answer is the model or one short line, and nothing else escapes."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.errors import ConfigError, ModelError
from engine.loader.precheck import check_model
from tests.engine.test_gguf_reader import entry, gguf_bytes, pair, string
from tests.support.loading import load
from tests.support.tiny_models import write_tiny_llama

ODD = (None, True, -1, 2**31, 2**64, 10**400, 1e308, "x", "\ud800", "long" * 10_000, [], [[1]], {"a": 1})
ROPE_KEYS = ("factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "low_freq_factor")


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    directory = write_tiny_llama(tmp_path_factory.mktemp("llama"), layers=1)
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.fixture
def directory(original: dict[str, bytes], tmp_path: Path) -> Path:
    for name, content in original.items():
        (tmp_path / name).write_bytes(content)
    return tmp_path


def checked(path: Path) -> str | None:
    """Return what is said of a model, by the quick look and by the whole one, or None when it loads."""
    said = []
    for look in (lambda: check_model(EngineConfig(model=str(path))), lambda: load(path)):
        try:
            look()
        except (ModelError, ConfigError) as error:
            said.append(str(error))
    for message in said:
        assert "\n" not in message
        assert len(message) < 2100
    return said[-1] if said else None


def with_odd_values(document: dict[str, object]) -> Iterator[str]:
    """Yield the document with every value, at its top and one below, replaced by every odd one."""
    places = [(key,) for key in document]
    places += [(key, inner) for key, value in document.items() if isinstance(value, dict) for inner in list(value)[:4]]
    for place in places:
        for odd in ODD:
            changed = copy.deepcopy(document)
            owner = changed
            for key in place[:-1]:
                owner = owner[key]  # type: ignore[assignment]
            owner[place[-1]] = odd
            yield json.dumps(changed)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"])
def test_a_value_of_any_kind_in_any_place_is_served_or_refused(directory: Path, name: str) -> None:
    refused = 0
    for text in with_odd_values(json.loads((directory / name).read_text())):
        (directory / name).write_text(text)
        refused += checked(directory) is not None
    assert refused > 5


@pytest.mark.parametrize("kind", ["yarn", "llama3", "linear"])
def test_rotary_settings_of_any_kind_are_served_or_refused(directory: Path, kind: str) -> None:
    config = json.loads((directory / "config.json").read_text())
    config.pop("rope_parameters")
    scaling = {"rope_type": kind, "factor": 2.0, "original_max_position_embeddings": 256}
    scaling |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    for key in ROPE_KEYS:
        for odd in (*ODD, 0, 1, 1e-300):
            (directory / "config.json").write_text(json.dumps({**config, "rope_scaling": {**scaling, key: odd}}))
            checked(directory)
    (directory / "config.json").write_text(json.dumps({**config, "rope_scaling": {**scaling, "factor": 1e308}}))
    assert checked(directory) is not None or kind != "yarn"


CUT_MAP = {"type": "Precompiled", "precompiled_charsmap": "/////w=="}
TOKENIZERS: dict[str, dict[str, object]] = {
    "a character map that claims 4 GiB": {"normalizer": CUT_MAP},
    "such a map deep inside": {"normalizer": {"type": "Sequence", "normalizers": [CUT_MAP]}},
    "a replacement of nothing": {"normalizer": {"type": "Replace", "pattern": {"Regex": ""}, "content": "x"}},
    "no token for unknown words": {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "zz"}},
    "an empty vocabulary": {"model": {"type": "Unigram", "unk_id": None, "vocab": []}},
    "an id behind all vocabularies": {"model": {"type": "BPE", "vocab": {"a": 2**32 - 1}, "merges": []}},
}


@pytest.mark.parametrize("case", TOKENIZERS)
def test_a_tokenizer_that_would_end_the_process_is_refused(directory: Path, case: str) -> None:
    path = directory / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **TOKENIZERS[case]}))
    message = checked(directory)
    assert message is not None
    assert "tokenizer" in message


@pytest.mark.parametrize(
    "template", ["{{" + "(" * 20_000 + "1" + ")" * 20_000 + "}}", "{% if 1 %}" * 5000 + "{% endif %}" * 5000]
)
def test_a_template_that_is_nested_without_end_is_refused(directory: Path, template: str) -> None:
    (directory / "chat_template.jinja").write_text(template)
    assert "chat template does not compile" in str(checked(directory))


KEYS = {
    "general.architecture": string("llama"),
    "llama.context_length": b"\0\2\0\0",
    "llama.embedding_length": b"\x20\0\0\0",
    "llama.block_count": b"\1\0\0\0",
    "llama.feed_forward_length": b"\x20\0\0\0",
    "llama.attention.head_count": b"\2\0\0\0",
    "llama.attention.layer_norm_rms_epsilon": b"\0\0\0\0",
    "llama.rope.freq_base": b"\0\0\0\0",
    "llama.rope.scaling.type": string("none"),
    "llama.expert_count": b"\0\0\0\0",
    "general.alignment": b"\x20\0\0\0",
    "tokenizer.ggml.model": string("gpt2"),
    "tokenizer.ggml.pre": string("gpt-2"),
    "tokenizer.ggml.bos_token_id": b"\1\0\0\0",
    "tokenizer.chat_template": string("a"),
}
VALUES = [
    pair("", 0, b"\5"),
    pair("", 7, b"\1"),
    pair("", 4, b"\xff" * 4),
    pair("", 5, b"\xff" * 4),
    pair("", 10, b"\xff" * 8),
    pair("", 6, b"\0\0\xc0\x7f"),
    pair("", 12, b"\xff" * 6 + b"\xef\x7f"),
    pair("", 8, string("")),
    pair("", 8, string("\x1b[2Jx" * 10_000)),
    pair("", 9, b"\x08\0\0\0" + bytes(8)),
    pair("", 9, b"\x04\0\0\0\1" + bytes(7) + bytes(4)),
]


@pytest.mark.parametrize("key", KEYS)
def test_a_key_of_any_type_is_served_or_refused(tmp_path: Path, key: str) -> None:
    path = tmp_path / "model.gguf"
    for value in VALUES:
        pairs = [pair(name, 8 if len(raw) > 4 or not raw else 4, raw) for name, raw in KEYS.items() if name != key]
        pairs.append(string(key) + value[8:])
        path.write_bytes(gguf_bytes(pairs=pairs, entries=[entry("token_embd.weight", (32, 4), 0, 0)], data=bytes(512)))
        assert checked(path) is not None
