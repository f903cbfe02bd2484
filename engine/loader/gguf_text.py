"""The text side of a GGUF file: tokenizer, chat template, special tokens, begin and end ids. Needs no torch."""

from __future__ import annotations

from engine.errors import ModelError
from engine.loader.checkpoint import TextFiles
from engine.loader.gguf import GGUFFile
from engine.text.gguf_tokenizer import adds_bos, tokenizer_json

_END_TOKENS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")


def read_gguf_text(file: GGUFFile) -> TextFiles:
    """Raises ModelError naming the file."""
    metadata = file.metadata
    template = metadata.get("tokenizer.chat_template")
    bos_id = metadata.get("tokenizer.ggml.bos_token_id")
    try:
        tokenizer, add_bos = tokenizer_json(metadata), adds_bos(metadata)
    except ModelError as error:
        raise ModelError(f"{file.path}: {error}", hint=error.hint) from error
    return TextFiles(
        tokenizer=tokenizer,
        chat_template=template.encode() if isinstance(template, str) else None,
        bos_id=bos_id if isinstance(bos_id, int) else None,
        add_bos=add_bos and isinstance(bos_id, int),
        special_tokens=_special_tokens(file),
    )


def gguf_eos_ids(file: GGUFFile) -> tuple[int, ...]:
    found = (file.metadata.get(key) for key in _END_TOKENS)
    return tuple(sorted({token for token in found if isinstance(token, int)}))


def _special_tokens(file: GGUFFile) -> dict[str, str]:
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    named: dict[str, str] = {}
    for hf_name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(tokens, list) and isinstance(token_id, int) and 0 <= token_id < len(tokens):
            named[f"{hf_name}_token"] = str(tokens[token_id])
    return named
