"""What is told of a model before anything is loaded: one line, a hint, and no torch for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.errors import ConfigError, HeadraceError, ModelError
from engine.loader.packaged import PACKAGED, cached_path, ensure
from engine.loader.precheck import check_model
from tests.engine.test_gguf_reader import gguf_bytes, pair, string
from tests.support.gguf_files import write_gguf
from tests.support.tiny_models import write_tiny, write_tiny_llama

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "llama", shard_size="50KB")


@pytest.fixture
def directory(llama: Path, tmp_path: Path) -> Path:
    """A copy to be damaged."""
    copy = tmp_path / "llama"
    copy.mkdir()
    for path in llama.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    return copy


def refusal(model: str | Path, **settings: object) -> HeadraceError:
    with pytest.raises((ModelError, ConfigError)) as caught:
        check_model(EngineConfig(model=str(model), **settings))  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize("model", ["smollm2", "random:tiny", "org/name", "org/name:Q4_K_M", "org/name@v1"])
def test_names_of_what_may_be_fetched_pass(model: str) -> None:
    check_model(EngineConfig(model=model))


def test_models_that_are_here_pass(llama: Path, tmp_path: Path) -> None:
    check_model(EngineConfig(model=str(llama)))
    write_gguf(write_tiny(tmp_path / "hf", "Qwen3ForCausalLM", head_dim=16), tmp_path / "m.gguf", "qwen3")
    check_model(EngineConfig(model=str(tmp_path / "m.gguf"), max_model_len=512))


NAMES = {
    "smolm2": ("is neither a directory", "Did you mean smollm2?"),
    "nope": ("is neither a directory", "safetensors"),
    "random:tini": ("no random model is called 'tini'", ""),
    "org/a--b": ("is no name of a hub's repository", ""),
    "org/name.git": ("is no name of a hub's repository", ""),
    f"org/{'n' * 200}": ("is no name of a hub's repository", ""),
    "x" * 5000: ("cannot be looked for", ""),
    "models/model.gguf": ("is neither a directory", ""),
    "a\0b/c": ("is neither a directory", ""),
}


@pytest.mark.parametrize("model", NAMES, ids=lambda model: model[:12])
def test_a_wrong_name_is_told_with_what_is_close(model: str) -> None:
    message, hint = NAMES[model]
    error = refusal(model)
    assert message in str(error)
    assert hint in str(error.hint)
    assert len(str(error)) < 500


def test_a_mistyped_path_is_told_with_what_lies_there(llama: Path) -> None:
    error = refusal(llama.parent / "lama")
    assert error.hint == f"Did you mean {llama}?"
    assert "is neither" in str(refusal(llama / "sub" / "model.gguf"))


def changed(**values: object) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        path = directory / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no configuration": (lambda d: (d / "config.json").unlink(), "config.json: missing file"),
    "no tokenizer": (lambda d: (d / "tokenizer.json").unlink(), "tokenizer.json: missing file"),
    "no index": (lambda d: (d / "model.safetensors.index.json").unlink(), "has neither"),
    "no shard": (lambda d: sorted(d.glob("model-0*"))[1].unlink(), ".safetensors: missing file"),
    "other architecture": (changed(architectures=["GemmaForCausalLM"]), "architecture 'GemmaForCausalLM' is not"),
    "architecture of no type": (changed(architectures=[{}], model_type=[]), "is not supported"),
    "quantised": (changed(quantization_config={"quant_method": "awq"}), "quantised with 'awq'"),
    "no number": (changed(hidden_size="64"), "'hidden_size' must be an integer"),
    "huge": (changed(vocab_size=2**40), "impossible model shape"),
    "no JSON": (lambda d: (d / "config.json").write_text("[" * 100_000), "cannot be read as JSON"),
    "a list": (lambda d: (d / "config.json").write_text("[]"), "must hold a JSON object"),
    "a shard elsewhere": (
        lambda d: (d / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../b"}}'),
        "which is no file name",
    ),
    "a configuration without end": (
        lambda d: os.truncate(d / "config.json", 1 << 40),
        "cannot be read as JSON: [Errno 27] File too large",
    ),
    "only a GGUF file": (
        lambda d: ((d / "config.json").unlink(), (d / "m.gguf").write_bytes(b"GGUF")),
        "has no config.json",
    ),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_directory_that_cannot_be_served_is_told_apart(directory: Path, case: str) -> None:
    damage, message = DAMAGE[case]
    damage(directory)
    assert message in str(refusal(directory))


def gguf(*pairs: bytes, architecture: str = "llama") -> bytes:
    return gguf_bytes(pairs=[pair("general.architecture", 8, string(architecture)), *pairs])


FILES = {
    "not GGUF": (b"PK\3\4" + bytes(100), "not a GGUF file"),
    "empty": (b"", "cannot be read as a GGUF file"),
    "cut": (gguf()[:40], "truncated GGUF file"),
    "other architecture": (gguf(architecture="gemma3"), "architecture 'gemma3' is not supported"),
    "experts": (gguf(pair("llama.expert_count", 4, b"\x08\0\0\0")), "mixture-of-experts"),
    "no sizes": (gguf(), "token_embd.weight' is missing"),
    "arrays of arrays": (gguf(pair("a", 9, b"\x09\0\0\0\x01" + bytes(7))), "unknown value type 9"),
}


@pytest.mark.parametrize("case", FILES)
def test_a_gguf_file_that_cannot_be_served_is_told_apart(tmp_path: Path, case: str) -> None:
    content, message = FILES[case]
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    assert message in str(refusal(path))


def test_a_tokenizer_that_is_not_known_is_told_without_reading_the_vocabulary(llama: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(llama_whole(tmp_path), path, "llama")
    path.write_bytes(path.read_bytes().replace(string("gpt-2"), string("gpt-9")))
    assert "pre-tokenizer 'gpt-9' is not supported" in str(refusal(path))


def llama_whole(tmp_path: Path) -> Path:
    return write_tiny_llama(tmp_path / "whole")


def test_a_file_beside_the_weights_is_no_model(directory: Path) -> None:
    error = refusal(directory / "config.json")
    assert "not a GGUF file" in str(error)
    assert "give the directory" in str(error.hint)


def test_a_window_or_a_template_that_cannot_be_is_told(llama: Path) -> None:
    assert "made for 1 to 512 tokens" in str(refusal(llama, max_model_len=513))
    assert "cannot be read" in str(refusal(llama, chat_template=str(llama / "none.jinja")))


def test_a_packaged_model_that_is_here_tells_its_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ensure("smollm2")
    assert "made for 1 to 8192 tokens" in str(refusal("smollm2", max_model_len=8193))
    path = cached_path(PACKAGED["smollm2"], tmp_path)
    monkeypatch.setenv("HEADRACE_CACHE_DIR", str(tmp_path))
    check_model(EngineConfig(max_model_len=8193))
    path.parent.mkdir()
    path.write_bytes(b"GGUF, but cut")
    check_model(EngineConfig(max_model_len=8193))


def test_serve_tells_it_before_the_port_is_open_and_without_torch(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom server.cli.main import run\n"
        "code = run(['serve', 'smolm2', '--port', '0'])\n"
        "print(code, *({'torch', 'fastapi', 'zmq', 'server.launcher'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "2\n"
    error, hint = done.stderr.splitlines()
    assert error.startswith("error: model 'smolm2' is neither")
    assert hint == "hint: Did you mean smollm2?"
