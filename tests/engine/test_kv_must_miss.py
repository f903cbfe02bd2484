"""What differs in anything that decides the bytes of stored KV finds nothing; what differs in nothing finds all."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from engine.kv.open_store import namespace_of
from engine.llm import LLM
from kvstore.manager.parts import BlockParts
from tests.support.decoders import DECODERS, write_decoder
from tests.support.store_llm import BLOCK, complete, engine, forget, loaded, store_of, told
from tests.support.tiny_models import VOCAB_SIZE, write_json, write_tiny_llama

TOKENS = 8 * BLOCK + 3
PROMPT = random.Random(5).choices(range(4, VOCAB_SIZE), k=TOKENS)
WHOLE = TOKENS // BLOCK * BLOCK


def tiers(directory: Path) -> tuple[str, ...]:
    return "ram=16MiB", f"disk={directory / 'kv'},64MiB,min-free=1MiB"


def fill(model: Path, directory: Path, **settings: object) -> None:
    with engine(model, *tiers(directory), **settings) as llm:
        complete(llm, [PROMPT])
        forget(llm)


def found(llm: LLM, prompt: list[int] = PROMPT) -> int:
    """Return how many tokens of a prompt come from the store's tiers."""
    return sum(loaded(complete(llm, [prompt])).values())


def found_by(model: Path, directory: Path, **settings: object) -> int:
    with engine(model, *tiers(directory), **settings) as llm:
        return found(llm)


def flip(model: Path, at: float) -> None:
    """Change one bit of a weight: the lowest of the one that lies so far into the tensors. Headers stay as they are."""
    path = model / "model.safetensors"
    data = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    data[start + int(at * (len(data) - start - 4)) // 4 * 4] ^= 1
    path.write_bytes(data)


def configure(model: Path, change: Callable[[dict[str, object]], object]) -> None:
    values = json.loads((model / "config.json").read_text())
    change(values)
    write_json(model / "config.json", values)


def other_theta(values: dict[str, object]) -> None:
    rope = values["rope_parameters"]
    assert isinstance(rope, dict)
    rope["rope_theta"] = rope["rope_theta"] + 1.0


MODELS: dict[str, Callable[[Path], None]] = {
    "the first weight's bit": lambda model: flip(model, 0.0),
    "a weight's bit": lambda model: flip(model, 0.37),
    "the last weight's bit": lambda model: flip(model, 1.0),
    "rope theta": lambda model: configure(model, other_theta),
    "norm epsilon": lambda model: configure(model, lambda values: values.update(rms_norm_eps=1e-4)),
}
SETTINGS: dict[str, dict[str, object]] = {
    "dtype": {"dtype": "bfloat16"},
    "block size": {"block_size": 2 * BLOCK},
    "numerics": {"numerics": "default"},
}


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and beside it a store in which an engine has left the prompt."""
    directory = tmp_path_factory.mktemp("filled")
    fill(write_tiny_llama(directory / "model"), directory)
    return directory


@pytest.fixture
def copied(filled: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(filled, tmp_path / "copy"))


def test_the_same_model_finds_all(copied: Path) -> None:
    assert found_by(copied / "model", copied) == WHOLE


@pytest.mark.parametrize("change", MODELS)
def test_another_model_finds_nothing(copied: Path, change: str) -> None:
    MODELS[change](copied / "model")
    assert found_by(copied / "model", copied) == 0


@pytest.mark.parametrize("setting", SETTINGS)
def test_an_engine_with_other_settings_finds_nothing(copied: Path, setting: str) -> None:
    assert found_by(copied / "model", copied, **SETTINGS[setting]) == 0


def test_an_adapters_kv_is_its_own(copied: Path) -> None:
    with engine(copied / "model", *tiers(copied)) as llm:
        assert llm._store is not None
        adapted = msgspec.structs.replace(namespace_of(llm.info), adapter="a")
        llm._store.client.use_namespace(BlockParts(adapted))
        assert found(llm) == 0
        forget(llm)
        assert found(llm) == WHOLE


@pytest.mark.parametrize("place", [0, 1, 3 * BLOCK - 1, 3 * BLOCK, 5 * BLOCK + 7, WHOLE - 1])
def test_another_token_leaves_what_is_before_its_block(filled: Path, place: int) -> None:
    prompt = list(PROMPT)
    prompt[place] = 4 + (prompt[place] + 1 - 4) % (VOCAB_SIZE - 4)
    with engine(filled / "model") as llm:
        cold = told(complete(llm, [prompt]))
    with engine(filled / "model", *tiers(filled)) as llm:
        answers = complete(llm, [prompt])
        assert told(answers) == cold
        assert sum(loaded(answers).values()) == place // BLOCK * BLOCK
        assert store_of(llm).stats().tiers[0].corrupt == {}


@pytest.mark.parametrize("name", DECODERS)
def test_every_architecture_misses_another_ones_weights_and_positions(name: str, tmp_path: Path) -> None:
    model = write_decoder(tmp_path / "model", name)
    fill(model, tmp_path)
    assert found_by(model, tmp_path) == WHOLE
    for change in ("a weight's bit", "rope theta"):
        other = Path(shutil.copytree(model, tmp_path / change))
        MODELS[change](other)
        assert found_by(other, tmp_path) == 0, change


@pytest.mark.parametrize("window", [24, None])
@pytest.mark.parametrize("name", ["mistral, windows"])
def test_another_window_finds_nothing(name: str, window: int | None, tmp_path: Path) -> None:
    model = write_decoder(tmp_path / "model", name)
    fill(model, tmp_path)
    configure(model, lambda values: values.update(sliding_window=window))
    assert found_by(model, tmp_path) == 0
