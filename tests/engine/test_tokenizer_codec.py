"""The codec's contract, on byte-level and SentencePiece kinds of vocabularies."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from threading import Thread
from time import sleep

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from engine.errors import ModelError, RequestError
from engine.protocol import AssetRef, TextAssets
from engine.text.machine import TextMachine
from engine.text.tokenizer import TextCodec
from tests.support.smollm2 import codec, tokenizer_bytes
from tests.support.tiny_codec import codec_of

BYTE_PIECES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = ["▁", "a", "b", "▁a", "ab", "▁ab", "日", "本", "日本", "▁▁"]


def sentencepiece(*, with_bytes: bool, strip: bool) -> Tokenizer:
    """Llama 2's kind: a space in front, spaces as U+2581, bytes for what is not in the vocabulary."""
    pieces = ["<unk>", "<s>", "</s>", *(BYTE_PIECES if with_bytes else []), *WORDS]
    merges = [("▁", "a"), ("a", "b"), ("▁a", "b"), ("日", "本"), ("▁", "▁")]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=with_bytes))
    prepend = [normalizers.Prepend("▁")] if strip else []
    tokenizer.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "▁")])
    steps: list[object] = [decoders.Replace("▁", " "), *([decoders.ByteFallback()] if with_bytes else [])]
    steps += [decoders.Fuse(), *([decoders.Strip(" ", 1, 0)] if strip else [])]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def metaspace() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram([(piece, -1.0 * i) for i, piece in enumerate(["<unk>", *WORDS])], 0, False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def codec_for(tokenizer: Tokenizer) -> TextCodec:
    return TextCodec(tokenizer.to_str().encode())


@settings(max_examples=100)
@given(st.text("ab 日本é🎉"), st.booleans())
def test_sentencepiece_with_bytes_gives_the_text_back(text: str, strip: bool) -> None:
    built = codec_for(sentencepiece(with_bytes=True, strip=strip))
    ids = built.encode(text, parse_special=True)
    # With a space put in front and taken away, an empty text is the one thing that is not told from one space.
    assert built.decode(ids) == text


@settings(max_examples=100)
@given(st.lists(st.integers(0, 268), max_size=12))
def test_sentencepiece_ids_decode_as_in_the_tokenizers_library(ids: list[int]) -> None:
    tokenizer = sentencepiece(with_bytes=True, strip=False)
    text = codec_for(tokenizer).decode(ids)
    # The library replaces each byte of an invalid run, we replace each maximal part, as Unicode recommends.
    if "\ufffd" not in text:
        assert text == tokenizer.decode(ids)


def test_a_stream_keeps_the_space_of_its_first_token() -> None:
    built = codec_for(sentencepiece(with_bytes=True, strip=True))
    ids = built.encode("ab a", parse_special=True)
    assert built.decode(ids) == "ab a"
    assert TextMachine(built).push(ids).text == " ab a"


def test_metaspace_and_sentencepiece_without_bytes() -> None:
    for tokenizer in (metaspace(), sentencepiece(with_bytes=False, strip=True)):
        built = codec_for(tokenizer)
        assert built.decode(built.encode("ab a", parse_special=True)) == "ab a"


def test_without_byte_fallback_a_piece_that_looks_like_a_byte_is_text() -> None:
    tokenizer = sentencepiece(with_bytes=False, strip=False)
    tokenizer.add_tokens(["<0x41>"])
    built = codec_for(tokenizer)
    assert built.decode([built.vocab_size - 1]) == "<0x41>"


def test_added_tokens_stand_for_themselves_whatever_the_alphabet() -> None:
    document = json.loads(tokenizer_bytes())
    content = "é Ġ日"
    document["added_tokens"].append(
        {"id": 49152, "content": content, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": False}
    )  # fmt: skip
    built = TextCodec(json.dumps(document).encode())
    assert built.token_bytes(49152) == content.encode()
    assert built.encode(f"a{content}b", parse_special=False)[1:-1] == [49152]


def special_as_letters(document: Mapping[str, object], text: str) -> list[int]:
    """The library's own switch, in a tokenizer of its own."""
    twin = Tokenizer.from_buffer(json.dumps(document).encode())
    twin.encode_special_tokens = True
    return list(twin.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("normalized", [False, True])
def test_special_tokens_are_letters_where_they_are_not_parsed(normalized: bool) -> None:
    document = json.loads(sentencepiece(with_bytes=True, strip=False).to_str())
    document["normalizer"] = {"type": "Lowercase"}
    for token in document["added_tokens"]:
        token["normalized"] = normalized
    built = TextCodec(json.dumps(document).encode())
    for text in ("a b", "a</s>b", "<S>", "<s", ""):
        assert built.encode(text, parse_special=False) == special_as_letters(document, text), text


def test_padding_ids_of_the_model_are_no_text_and_foreign_ids_are_refused() -> None:
    built = TextCodec(tokenizer_bytes(), vocab_size=49280)
    assert built.vocab_size == 49280
    assert built.token_bytes(49279) == b""
    assert built.token_text(49279) == ""
    assert TextMachine(built).push([49279]).text == ""
    for foreign in (-1, 49280, 2**32 - 1, 2**64):
        with pytest.raises(RequestError) as caught:
            built.decode([19556, foreign])
        assert (caught.value.param, caught.value.value) == ("tokens", foreign)


@pytest.mark.parametrize("text", ["\ud83d", "a\udc00b", "\ud83d \ude00"])
def test_lone_surrogates_are_refused_by_name(text: str) -> None:
    for parse_special in (True, False):
        with pytest.raises(RequestError, match="surrogate") as caught:
            codec().encode(text, parse_special=parse_special, param="messages")
        assert caught.value.param == "messages"


def test_partial_characters_have_bytes_and_a_replacement_text() -> None:
    ids = codec().encode("🎉", parse_special=True)
    assert len(ids) > 1
    assert b"".join(map(codec().token_bytes, ids)) == "🎉".encode()
    assert codec().token_text(ids[0]) == "\ufffd"


def test_special_tokens_have_no_bytes_unless_shown() -> None:
    built = codec_of([b"a", b"<|end|>"], special=[1])
    assert [built.token_bytes(1), built.token_bytes(1, show_special=True)] == [b"", b"<|end|>"]
    assert [built.decode([0, 1, 0]), built.decode([0, 1, 0], show_special=True)] == ["aa", "a<|end|>a"]
    assert [built.is_special(0), built.is_special(1)] == [False, True]


def assets_of(*, add_bos: bool) -> TextAssets:
    digest = hashlib.sha256(tokenizer_bytes()).hexdigest()
    return TextAssets(tokenizer=AssetRef(digest, len(tokenizer_bytes())), bos_id=1, add_bos=add_bos)


def test_bos_is_prepended_where_the_model_and_the_caller_want_it() -> None:
    for wanted in (True, False):
        text = assets_of(add_bos=wanted)
        built = TextCodec.from_assets(text, {text.tokenizer.digest: tokenizer_bytes()})
        assert built.encode("Hello", parse_special=True, add_bos=True) == ([1] if wanted else []) + [19556]
        assert built.encode("Hello", parse_special=True) == [19556]


def test_a_tokenizer_file_s_own_template_and_truncation_add_and_drop_nothing() -> None:
    tokenizer = Tokenizer.from_buffer(tokenizer_bytes())
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=8)
    document = json.loads(tokenizer.to_str())
    document["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}},
    }
    built = TextCodec(json.dumps(document).encode())
    text = "One two three four."
    assert built.encode(text, parse_special=True) == codec().encode(text, parse_special=True)
    assert built.encode(text, parse_special=False) == codec().encode(text, parse_special=False)


@pytest.mark.parametrize(
    "source",
    [b"", b"{}", b"not json", tokenizer_bytes()[:1000], b'{"version":"1.0","model":{"type":"Unheard","vocab":{}}}'],
)
def test_a_broken_tokenizer_is_one_line(source: bytes) -> None:
    with pytest.raises(ModelError) as caught:
        TextCodec(source)
    assert "\n" not in str(caught.value)


def test_a_decoder_that_cannot_go_token_by_token_is_refused() -> None:
    tokenizer = Tokenizer(models.WordPiece({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(ModelError, match="WordPiece"):
        codec_for(tokenizer)


def test_threads_share_one_codec() -> None:
    built = TextCodec(tokenizer_bytes())
    texts = [f"<|im_start|>user {i}" for i in range(200)]
    with ThreadPoolExecutor(4) as pool:
        parsed = list(pool.map(lambda text: built.encode(text, parse_special=True), texts))
        literal = list(pool.map(lambda text: built.encode(text, parse_special=False), texts))
    assert all(ids[0] == 1 for ids in parsed)
    assert not any(1 in ids for ids in literal)


def test_other_threads_go_on_while_a_long_text_is_encoded() -> None:
    codec = codec_of([b"a", b"aa", b"aaaa"])
    encoding = Thread(target=codec.encode, args=("a" * 1_000_000,), kwargs={"parse_special": True})
    encoding.start()
    turns = 0
    while encoding.is_alive():
        sleep(0)
        turns += 1
    # A lock that is held for the whole text leaves this thread one turn before and one after it.
    assert turns > 10


def test_the_longest_token_bounds_a_text_from_below() -> None:
    codec = codec_of([b"a", b"aa", b"aaaa", b"<|a long special token|>"], special=[3])
    text = "a" * 401 + "<|a long special token|>"
    assert codec.longest_token == len("<|a long special token|>")
    assert len(codec.encode(text, parse_special=True)) >= len(text) / codec.longest_token
