"""A small byte-level tokenizer and a chat template, made here: every byte is a token, and so are a few pairs."""

from __future__ import annotations

import hashlib
import json

from engine.protocol import AssetRef, TextAssets

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS_ID = 2
PAIRS = (("t", "h"), ("th", "e"), ("i", "n"), ("e", "r"), ("Ġ", "the"), ("q", "u"), ("o", "n"), ("l", "l"))

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _byte_letters() -> list[str]:
    """The printable letter of each byte, in the byte's order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + i) for i, byte in enumerate(others)}
    return [letters[byte] for byte in range(256)]


def tokenizer_json() -> bytes:
    pieces = [*SPECIALS, *_byte_letters(), *(left + right for left, right in PAIRS)]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": piece, **special} for i, piece in enumerate(SPECIALS)],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {piece: i for i, piece in enumerate(pieces)},
            "merges": [list(pair) for pair in PAIRS],
        },
    }
    return json.dumps(document).encode()


VOCAB_SIZE = len(SPECIALS) + 256 + len(PAIRS)


def byte_ids(data: bytes) -> list[int]:
    """Return one token per byte, whatever the bytes are: text cut in the least lucky places."""
    return [len(SPECIALS) + byte for byte in data]


def text_assets(*, with_template: bool = True, template: str = CHAT_TEMPLATE) -> tuple[TextAssets, dict[str, bytes]]:
    """Return the description and the bytes by digest, as an engine serves them."""
    files = [tokenizer_json()] + ([template.encode()] if with_template else [])
    assets = {hashlib.sha256(data).hexdigest(): data for data in files}
    references = [AssetRef(digest, len(data)) for digest, data in assets.items()]
    text = TextAssets(tokenizer=references[0], chat_template=references[1] if with_template else None)
    return text, assets
