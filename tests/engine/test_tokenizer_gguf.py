"""Tokenizers built from GGUF metadata: llama.cpp's ids, by a table and by an independent slow encoder."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import ModelError
from engine.text.gguf_tokenizer import adds_bos, tokenizer_json
from engine.text.tokenizer import TextCodec
from tests.support.smollm2 import codec, metadata, tokenizer_bytes
from tests.support.tiny_codec import byte_symbols

GPT2 = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
SPLITS = {
    "smollm": lambda text: [p for part in regex.split(r"(\p{N})", text) for p in GPT2.findall(part)],
    "gpt-2": GPT2.findall,
    "llama-bpe": regex.compile(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+"
    ).findall,
    "qwen2": regex.compile(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+"
    ).findall,
}


class SlowBPE:
    """Splits by the book, then joins the pair of lowest rank, leftmost first, until there is none."""

    def __init__(self, values: Mapping[str, object], pre: str) -> None:
        tokens, merges, types = (values[f"tokenizer.ggml.{key}"] for key in ("tokens", "merges", "token_type"))
        self.ids = {token: i for i, token in enumerate(tokens)}
        self.ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}
        self.special = {token: i for i, (token, kind) in enumerate(zip(tokens, types, strict=True)) if kind == 3}
        self.split = SPLITS[pre]
        self.whole_words = pre == "llama-bpe"
        self.symbols = byte_symbols()

    def encode(self, text: str) -> list[int]:
        any_special = "|".join(regex.escape(token) for token in sorted(self.special, key=len, reverse=True))
        ids: list[int] = []
        for part in regex.split(f"({any_special})", text) if any_special else [text]:
            if part in self.special:
                ids.append(self.special[part])
            else:
                ids += [i for piece in self.split(part) for i in self.piece(piece)]
        return ids

    def piece(self, piece: str) -> Iterator[int]:
        parts = [self.symbols[byte] for byte in piece.encode()]
        if self.whole_words and "".join(parts) in self.ids:
            parts = ["".join(parts)]
        while pairs := [(self.ranks[pair], i) for i, pair in enumerate(pairwise(parts)) if pair in self.ranks]:
            _, i = min(pairs)
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        return (self.ids[part] for part in parts if part in self.ids)


@pytest.fixture(scope="module")
def twin() -> SlowBPE:
    return SlowBPE(metadata(), "smollm")


PINNED: list[tuple[str, list[int]]] = [
    ("", []),
    ("Hello world!", [19556, 905, 17]),
    ("The answer is 42, not 1337.", [504, 2988, 314, 216, 36, 34, 28, 441, 216, 33, 35, 35, 39, 30]),
    ("x = 3.14159e-10", [104, 446, 216, 35, 30, 33, 36, 33, 37, 41, 85, 29, 33, 32]),
    ("½ ² ٣ Ⅷ", [16738, 216, 19133, 216, 164, 113, 216, 173, 223, 117]),
    ("日本語テキスト", [23274, 115, 40993, 179, 120, 248, 11100, 224, 10391, 251, 10391, 134, 11100, 226]),
    (
        "\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f389",
        [10813, 235, 118, 321, 231, 10813, 235, 119, 321, 231, 10813, 235, 117, 15107, 232, 227],
    ),
    ("étude naïve", [85, 151, 219, 100, 8273, 15486, 46494]),
    ("  two  spaces  ", [216, 827, 216, 5600, 256]),
    ("\t\ttabs\r\n\r\nlines\n", [197, 197, 100, 7366, 7209, 198, 5110, 198]),
    ("I'll don't WE'RE it's", [57, 3060, 1326, 982, 26587, 23, 3256, 357, 506]),
    ("def f(x):\n    return x**2", [1604, 275, 24, 104, 727, 472, 1003, 1792, 828, 34]),
    ("<|im_start|>user\nhi<|im_end|>\n", [1, 4093, 198, 6004, 2, 198]),
    ("<|im_start", [44, 108, 306, 79, 3738]),
    ("a\xa0b\u3000c\u200b", [81, 15442, 82, 12109, 218, 83, 321, 229]),
    ("!!!???...", [29646, 16693, 47, 2026]),
    ("https://a.b/c?d=1&e=%20", [4687, 1742, 81, 30, 82, 31, 83, 47, 84, 45, 33, 22, 85, 23446, 34, 32]),
]


@pytest.mark.parametrize(("text", "ids"), PINNED)
def test_ids_are_pinned(text: str, ids: list[int], twin: SlowBPE) -> None:
    assert codec().encode(text, parse_special=True) == ids
    assert twin.encode(text) == ids


odd_text = st.text(
    st.one_of(
        st.sampled_from(list(" \n\t\r'sStTrRdD.,!?-_09½²٣日本é🎉👍\u0301\u200d\u00a0\u3000\u0006")),
        st.characters(codec="utf-8").filter(lambda char: unicodedata.category(char) != "Cn"),
    ),
    max_size=40,
)
pieces = st.lists(
    st.one_of(
        odd_text,
        st.sampled_from([" the", "'ll", "'S", "  ", "\n\n", "12345", " 3.14", "<|im_start|>", "def f(x):\n    "]),
    ),
    max_size=6,
).map("".join)


@settings(max_examples=500)
@given(pieces)
def test_ids_equal_the_slow_encoder_s(twin: SlowBPE, text: str) -> None:
    assert codec().encode(text, parse_special=True) == twin.encode(text)


def has_no_token(char: str) -> bool:
    """This vocabulary lacks six control characters, and two first bytes of planes without assigned characters."""
    return char in "\x04\x06\x13\x14\x16\x1d" or 0x40000 <= ord(char) < 0xC0000


@settings(max_examples=300)
@given(st.text(st.characters(codec="utf-8").filter(lambda char: not has_no_token(char))), st.booleans())
def test_decoding_gives_the_text_back(text: str, parse_special: bool) -> None:
    ids = codec().encode(text, parse_special=parse_special)
    assert codec().decode(ids, show_special=True) == text


def test_bytes_without_a_token_are_dropped_and_nothing_merges_across_them() -> None:
    one = codec().encode("!", parse_special=True)
    assert codec().encode("!!", parse_special=True) != one * 2
    assert codec().encode("!\x06!", parse_special=True) == one * 2
    assert codec().encode("\x06", parse_special=True) == []


@given(st.text("0123456789", min_size=1, max_size=30))
def test_digits_are_single_tokens(text: str) -> None:
    ids = codec().encode(text, parse_special=True)
    assert [codec().token_text(i) for i in ids] == list(text)


def test_every_special_token_is_one_token_when_parsed_and_letters_when_not() -> None:
    types, tokens = metadata()["tokenizer.ggml.token_type"], metadata()["tokenizer.ggml.tokens"]
    special = [i for i, kind in enumerate(types) if kind == 3]
    assert len(special) == 17
    for i in special:
        assert codec().encode("a" + tokens[i] + "b", parse_special=True)[1:-1] == [i]
        literal = codec().encode(tokens[i], parse_special=False)
        assert not any(map(codec().is_special, literal))
        assert codec().decode(literal) == tokens[i]
        assert codec().token_bytes(i) == b""
        assert codec().token_text(i) == tokens[i]


def test_the_same_metadata_gives_the_same_bytes() -> None:
    assert tokenizer_json(metadata()) == tokenizer_bytes()
    assert codec().vocab_size == 49152


def vocabulary(pre: str, merges: Sequence[str] = (), more: Mapping[str, int] | None = None) -> dict[str, object]:
    """All bytes, the merges' results, and more entries by type."""
    tokens = byte_symbols() + [merge.replace(" ", "") for merge in merges] + list(more or ())
    kinds = [1] * (256 + len(merges)) + list((more or {}).values())
    return {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre, "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds, "tokenizer.ggml.merges": list(merges),
    }  # fmt: skip


MERGES = ["1 2", "12 3", "Ġ a", "' L", "'L L", "a b", "ab c", "Ċ Ċ", "Ġ Ġ", "! Ċ", "2 3", "3 4"]


@settings(max_examples=200)
@given(st.sampled_from(["smollm", "gpt-2", "llama-bpe", "qwen2"]), st.text("123ab cL'!\n\t é", max_size=30))
def test_each_pre_tokenizer_splits_by_its_own_rules(pre: str, text: str) -> None:
    values = vocabulary(pre, MERGES, {"bca": 1})
    assert TextCodec(tokenizer_json(values)).encode(text, parse_special=True) == SlowBPE(values, pre).encode(text)


def test_llama3_takes_a_piece_of_the_vocabulary_whole() -> None:
    whole = vocabulary("llama-bpe", MERGES, {"bca": 1})
    assert TextCodec(tokenizer_json(whole)).encode("bca", parse_special=True) == [256 + len(MERGES)]
    merged = vocabulary("gpt-2", MERGES, {"bca": 1})
    assert len(TextCodec(tokenizer_json(merged)).encode("bca", parse_special=True)) == 3


def test_digits_split_as_each_model_was_trained() -> None:
    texts = {}
    for pre in ("smollm", "qwen2", "llama-bpe", "gpt-2", "default"):
        built = TextCodec(tokenizer_json(vocabulary(pre, ["1 2", "12 3", "3 4", "123 4"])))
        texts[pre] = [built.token_text(i) for i in built.encode("1234", parse_special=True)]
    assert texts == {
        "smollm": ["1", "2", "3", "4"],
        "qwen2": ["1", "2", "3", "4"],
        "llama-bpe": ["123", "4"],
        "gpt-2": ["1234"],
        "default": ["123", "4"],
    }


def test_user_defined_tokens_are_text_and_unused_ones_are_nothing() -> None:
    built = TextCodec(tokenizer_json(vocabulary("gpt-2", [], {"<tool>": 4, "[PAD0]": 5, "<eos>": 3})))
    assert built.encode("<tool>[<eos>", parse_special=True) == [256, byte_symbols().index("["), 258]
    assert built.decode([256, 257, 258]) == "<tool>"
    assert not built.is_special(256)
    assert built.is_special(258)
    assert 256 in built.encode("<tool>", parse_special=False)


def test_bos_is_added_where_the_file_or_its_kind_says_so() -> None:
    assert not adds_bos(vocabulary("gpt-2"))
    assert adds_bos(vocabulary("llama-bpe"))
    assert not adds_bos({**vocabulary("llama-bpe"), "tokenizer.ggml.add_bos_token": False})
    assert adds_bos({**vocabulary("gpt-2"), "tokenizer.ggml.add_bos_token": True})
    assert not adds_bos(metadata())


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"tokenizer.ggml.model": "bert"}, "'bert'"),
        ({"tokenizer.ggml.model": "llama"}, "no byte fallback"),
        ({"tokenizer.ggml.model": None}, "None"),
        ({"tokenizer.ggml.pre": "new-kind"}, "'new-kind'"),
        ({"tokenizer.ggml.tokens": None}, "tokens"),
        ({"tokenizer.ggml.tokens": [1, 2]}, "tokens"),
        ({"tokenizer.ggml.token_type": [1]}, "token_type"),
        ({"tokenizer.ggml.token_type": 1}, "token_type"),
        ({"tokenizer.ggml.merges": None}, "merges"),
        ({"tokenizer.ggml.merges": ["a"]}, "merge 'a'"),
        ({"tokenizer.ggml.merges": ["a b c"]}, "merge 'a b c'"),
        ({"tokenizer.ggml.merges": ["a z"]}, "merge 'a z'"),
    ],
)
def test_unknown_and_broken_vocabularies_are_refused_in_one_line(changes: Mapping[str, object], named: str) -> None:
    with pytest.raises(ModelError) as caught:
        tokenizer_json({**vocabulary("gpt-2", ["a b"]), **changes})
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_vocabulary_with_the_same_token_twice_is_refused() -> None:
    values = vocabulary("gpt-2")
    values["tokenizer.ggml.tokens"] = [*byte_symbols()[:-1], "a"]
    with pytest.raises(ModelError, match="twice"):
        tokenizer_json(values)


def test_the_document_is_plain_json_with_ids_in_order() -> None:
    document = json.loads(tokenizer_bytes())
    assert list(document["model"]["vocab"].values()) == list(range(49152))
    assert [token["id"] for token in document["added_tokens"]] == list(range(17))
