"""The text side of a Hugging Face directory: tokenizer.json, chat template, special tokens, begin and end ids."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from engine.errors import ModelError
from engine.loader.checkpoint import TextFiles
from engine.loader.files import MAX_TEXT_BYTES, read_regular
from engine.loader.json_file import JsonFile

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


@dataclass(frozen=True, slots=True)
class HFText:
    """Text files of a directory and the end ids that the tokenizer names."""

    files: TextFiles
    eos_ids: tuple[int, ...]


def read_text(directory: Path, config: JsonFile) -> HFText:
    """Read what belongs to text beside `config`, the directory's config.json. Raises ModelError naming the file."""
    tokenizer_path = directory / "tokenizer.json"
    tokenizer = JsonFile.read(tokenizer_path, MAX_TEXT_BYTES)
    settings = JsonFile.read_optional(directory / "tokenizer_config.json")
    special = _special_tokens(settings.values)
    ids = _token_ids(tokenizer.values)
    bos_id = ids.get(special.get("bos_token", ""))
    if bos_id is None:
        bos_id = next(iter(config.token_ids("bos_token_id")), None)
    eos_id = ids.get(special.get("eos_token", ""))
    adds_bos = settings.values.get("add_bos_token") is True or _template_starts_with_token(tokenizer.values)
    files = TextFiles(
        tokenizer=_checked_utf8(tokenizer_path),
        chat_template=_chat_template(directory, settings),
        bos_id=bos_id,
        add_bos=adds_bos and bos_id is not None,
        special_tokens=special,
    )
    return HFText(files, () if eos_id is None else (eos_id,))


def all_eos_ids(config: JsonFile, generation: JsonFile, text: HFText) -> tuple[int, ...]:
    """Return the end ids that any of a directory's files names."""
    return tuple(sorted({*config.token_ids("eos_token_id"), *generation.token_ids("eos_token_id"), *text.eos_ids}))


def _special_tokens(settings: Mapping[str, object]) -> dict[str, str]:
    """A token is given as its text, or as an object that has it under `content`."""
    found: dict[str, str] = {}
    for name in _NAMED_TOKENS:
        value = settings.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            found[name] = value
    return found


def _token_ids(tokenizer: Mapping[str, object]) -> dict[str, int]:
    added = tokenizer.get("added_tokens")
    entries = [entry for entry in added if isinstance(entry, dict)] if isinstance(added, list) else []
    return {
        str(entry["content"]): entry["id"]
        for entry in entries
        if isinstance(entry.get("id"), int) and "content" in entry
    }


def _template_starts_with_token(tokenizer: Mapping[str, object]) -> bool:
    """True when tokenizer.json's own post-processor puts a special token before a single text."""
    processor = tokenizer.get("post_processor")
    if not isinstance(processor, dict):
        return False
    nested = processor.get("processors")
    stages = nested if isinstance(nested, list) else [processor]
    for stage in stages:
        single = stage.get("single") if isinstance(stage, dict) else None
        if isinstance(single, list) and single and isinstance(single[0], dict) and "SpecialToken" in single[0]:
            return True
    return False


def _chat_template(directory: Path, settings: JsonFile) -> bytes | None:
    """A file of its own wins over tokenizer_config.json; of several named templates the default one is taken."""
    path = directory / "chat_template.jinja"
    if path.exists():
        return _checked_utf8(path)
    template = settings.values.get("chat_template")
    if isinstance(template, list):
        named = {str(entry.get("name")): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    if template is None:
        return None
    if not isinstance(template, str):
        raise ModelError(f"{settings.path}: 'chat_template' must be a string or a list of named templates")
    try:
        return template.encode()
    except UnicodeEncodeError as error:  # half of a pair, which JSON can hold and no text
        raise ModelError(f"{settings.path}: 'chat_template' is not Unicode text: {error.reason}") from error


def _checked_utf8(path: Path) -> bytes:
    try:
        source = read_regular(path)
        source.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path}: cannot be read as text: {error}") from error
    return source
