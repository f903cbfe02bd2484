"""From a GGUF file's metadata to the bytes of a tokenizer.json whose token ids are llama.cpp's.

Knows the metadata keys and the pre-tokenizers of byte-level BPE vocabularies; knows neither how a GGUF file is read
nor how text is encoded. A vocabulary that it does not know for certain is refused: a tokenizer that is nearly right
costs quality in silence.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

import msgspec

from engine.errors import ModelError
from engine.text.byte_level import BYTE_OF
from engine.text.gguf_sentencepiece import sentencepiece_json
from engine.text.gguf_vocabulary import ADDED, TokenType, added_token, strings, token_types

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_ANY_CASE_CONTRACTION = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_CL100K = (
    _ANY_CASE_CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{%s}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


SENTENCEPIECE = "llama"


class _PreTokenizer(msgspec.Struct, frozen=True):
    """Each pattern splits further what the one before it left; text between matches is a piece as well.

    With `whole_words`, a piece that is itself in the vocabulary is taken whole, merges or not. `add_bos` holds for
    files that do not say.
    """

    patterns: tuple[str, ...]
    whole_words: bool = False
    add_bos: bool = False


_SMOLLM = _PreTokenizer((r"\p{N}", _GPT2))
_LLAMA3 = _PreTokenizer((_CL100K % "1,3",), whole_words=True, add_bos=True)
_QWEN2 = _PreTokenizer((_CL100K % "1",))
_PRE_TOKENIZERS: Mapping[str, _PreTokenizer] = {
    "smollm": _SMOLLM,
    "starcoder": _SMOLLM,
    "gpt-2": _PreTokenizer((_GPT2,)),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "default": _PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
}


def tokenizer_json(metadata: Mapping[str, object]) -> bytes:
    """Return the tokenizer.json of a GGUF vocabulary; the same metadata gives the same bytes. Raises ModelError."""
    if metadata.get("tokenizer.ggml.model") == SENTENCEPIECE:
        return sentencepiece_json(metadata)
    pre = _pre_tokenizer(metadata)
    tokens = strings(metadata, "tokenizer.ggml.tokens")
    types = token_types(metadata, len(tokens))
    # Unused entries only pad the vocabulary: no text leads to them and they lead to no text.
    vocab = {token: i for i, token in enumerate(tokens) if types[i] != TokenType.UNUSED}
    if len(vocab) != sum(kind != TokenType.UNUSED for kind in types):
        raise ModelError("The GGUF file's vocabulary holds the same token twice.")
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [added_token(i, tokens[i], kind) for i, kind in enumerate(types) if kind in ADDED],
        "normalizer": None,
        "pre_tokenizer": _splitting(pre.patterns, [symbol for symbol in BYTE_OF if symbol not in vocab]),
        "post_processor": None,
        "decoder": _byte_level(),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre.whole_words,
            "vocab": vocab,
            "merges": _merges(metadata, vocab),
        },
    }
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()


def check_tokenizer_kind(metadata: Mapping[str, object]) -> None:
    """Raise ModelError for a kind of tokenizer that is not known, without a look at the vocabulary."""
    if metadata.get("tokenizer.ggml.model") != SENTENCEPIECE:
        _pre_tokenizer(metadata)


def adds_bos(metadata: Mapping[str, object]) -> bool:
    """Whether raw prompts of this vocabulary start with its BOS token. Raises ModelError as `tokenizer_json` does."""
    stated = metadata.get("tokenizer.ggml.add_bos_token")
    if stated is not None:
        return bool(stated)
    return metadata.get("tokenizer.ggml.model") == SENTENCEPIECE or _pre_tokenizer(metadata).add_bos


def _pre_tokenizer(metadata: Mapping[str, object]) -> _PreTokenizer:
    model = metadata.get("tokenizer.ggml.model")
    if model != "gpt2":
        raise ModelError(
            f"The GGUF file's tokenizer model {model!r} is not supported.",
            hint="Supported: 'gpt2' (byte-level BPE) and 'llama' (SentencePiece BPE). A directory with a tokenizer.json"
            " works for other kinds.",
        )
    name = metadata.get("tokenizer.ggml.pre", "default")
    pre = _PRE_TOKENIZERS.get(str(name))
    if pre is None:
        known = ", ".join(sorted(_PRE_TOKENIZERS))
        raise ModelError(
            f"The GGUF file's pre-tokenizer {name!r} is not supported.",
            hint=f"Supported: {known}. A directory with a tokenizer.json works for other kinds.",
        )
    return pre


def _splitting(patterns: Sequence[str], missing: Sequence[str]) -> dict[str, object]:
    """Bytes that no token stands for (control characters, often) are dropped, and nothing merges across them."""
    steps = [_split(pattern, "Isolated") for pattern in patterns]
    steps.append(_byte_level())
    if missing:
        steps.append(_split("[" + "".join(map(re.escape, missing)) + "]", "Removed"))
    return {"type": "Sequence", "pretokenizers": steps}


def _split(pattern: str, behavior: str) -> dict[str, object]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": behavior, "invert": False}


def _byte_level() -> dict[str, object]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}


def _merges(metadata: Mapping[str, object], vocab: Mapping[str, int]) -> list[list[str]]:
    """Byte-level symbols hold no space, so the space between the two halves is the only one."""
    merges = [line.split(" ") for line in strings(metadata, "tokenizer.ggml.merges")]
    for pair in merges:
        if len(pair) != 2 or pair[0] not in vocab or pair[1] not in vocab or pair[0] + pair[1] not in vocab:
            raise ModelError(f"The GGUF file's merge {' '.join(pair)!r} does not fit its vocabulary.")
    return merges
