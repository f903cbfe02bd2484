"""Codecs whose tokens stand for chosen bytes: a real byte-level tokenizer.json with that vocabulary."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence

from engine.text.tokenizer import TextCodec


def byte_symbols() -> list[str]:
    """Symbol of each byte in byte-level vocabularies."""
    printable = set(range(0x21, 0x7F)) | set(range(0xA1, 0xAD)) | set(range(0xAE, 0x100))
    symbols, next_code = [], 0x100
    for byte in range(256):
        symbols.append(chr(byte) if byte in printable else chr(next_code))
        next_code += byte not in printable
    return symbols


def codec_of(pieces: Sequence[bytes], *, special: Collection[int] = ()) -> TextCodec:
    """Token i stands for pieces[i], which are distinct; those in `special` are special tokens."""
    symbols = byte_symbols()
    vocab = {"".join(symbols[byte] for byte in piece): i for i, piece in enumerate(pieces) if i not in special}
    added = [
        {
            "id": i, "content": pieces[i].decode(), "single_word": False, "lstrip": False, "rstrip": False,
            "normalized": False, "special": True,
        }
        for i in special
    ]  # fmt: skip
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    document = {
        "version": "1.0", "added_tokens": added, "pre_tokenizer": byte_level, "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }  # fmt: skip
    return TextCodec(json.dumps(document).encode())


def stream_codec(tokens: Sequence[bytes]) -> tuple[TextCodec, list[int]]:
    """A codec and the ids that stand for a stream of tokens, equal bytes being the same token."""
    pieces = list(dict.fromkeys(tokens))
    ids = {piece: i for i, piece in enumerate(pieces)}
    return codec_of(pieces), [ids[token] for token in tokens]
