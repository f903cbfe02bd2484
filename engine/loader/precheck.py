"""What can be told of a model before it is loaded: whether it is there, and whether it is of a kind that can be served.

Reads configurations and headers, never weights, asks no hub, and imports no torch: a mistyped name is told in a blink.
What it lets pass may still be refused by engine/loader/load.py, which reads everything.
"""

from __future__ import annotations

from pathlib import Path

from engine.config import EngineConfig
from engine.errors import ConfigError, ModelError
from engine.loader import hub
from engine.loader.files import open_regular
from engine.loader.gguf import MAGIC, GGUFFile
from engine.loader.gguf_config import GGUFConfig
from engine.loader.hf_config import architecture_of, decoder_config
from engine.loader.json_file import JsonFile
from engine.loader.packaged import PACKAGED, cached_path
from engine.loader.random_shapes import RANDOM_PREFIX, shape_named
from engine.loader.shards import SINGLE_FILE, sharded
from engine.loader.sources import source_of
from engine.loader.template_file import template_source
from engine.models.llama_config import ARCHITECTURES, LlamaConfig
from engine.text.gguf_tokenizer import check_tokenizer_kind


def check_model(config: EngineConfig) -> None:
    """Raise ModelError or ConfigError for what is wrong at first sight."""
    if config.chat_template is not None:
        template_source(config.chat_template)
    shape = _shape_of(config.model)
    if shape is not None:
        check_window(config.max_model_len, shape.max_positions, config.model)


def _shape_of(model: str) -> LlamaConfig | None:
    """Return the model's shape if its files are here."""
    if model.startswith(RANDOM_PREFIX):
        return shape_named(model.removeprefix(RANDOM_PREFIX))
    source_of(model)
    path = Path(model).expanduser()
    if path.is_dir():
        return _directory_shape(path)
    if path.exists():
        return _gguf_shape(path)
    if model in PACKAGED:
        return _packaged_shape(model)
    hub.check(model)
    return None


def _packaged_shape(model: str) -> LlamaConfig | None:
    """A file that is not whole is no fault of the user's: it will be fetched again."""
    try:
        return _gguf_shape(cached_path(PACKAGED[model]))
    except ModelError:
        return None


def check_window(wanted: int | None, longest: int, model: object) -> int:
    """Return the window to serve. Raises ConfigError."""
    if wanted is None:
        return longest
    if not 0 < wanted <= longest:
        raise ConfigError(
            f"max_model_len {wanted} is out of range: {model} was made for 1 to {longest} tokens",
            hint=f"Use --max-model-len {longest} or less.",
        )
    return wanted


def check_gguf_magic(path: Path) -> None:
    """Raise ModelError unless a file may be GGUF: by its name, whose content is then to blame, or by its start."""
    if path.suffix == ".gguf":
        return
    try:
        with open_regular(path) as file:
            start = file.read(len(MAGIC))
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error}") from error
    if start != MAGIC:
        raise ModelError(f"{path}: not a GGUF file", hint="For safetensors, give the directory that holds them.")


def _directory_shape(directory: Path) -> LlamaConfig:
    if not (directory / "config.json").exists() and (found := next(directory.glob("*.gguf"), None)):
        raise ModelError(f"{directory}: has no config.json", hint=f"A GGUF file is named itself: {found}")
    file = JsonFile.read(directory / "config.json")
    shape = decoder_config(file, architecture_of(file, ARCHITECTURES))
    if not (directory / "tokenizer.json").exists():
        raise ModelError(f"{directory / 'tokenizer.json'}: missing file")
    if not (directory / SINGLE_FILE).exists():
        for path in sorted(set(sharded(directory).values())):
            if not path.exists():
                raise ModelError(f"{path}: missing file", hint="Is the download whole? Fetch it again.")
    return shape


def _gguf_shape(path: Path) -> LlamaConfig:
    check_gguf_magic(path)
    with GGUFFile(path, arrays=False) as file:
        shape = GGUFConfig(file).read()
        try:
            check_tokenizer_kind(file.metadata)
        except ModelError as error:
            raise ModelError(f"{path}: {error}", hint=error.hint) from error
    return shape
