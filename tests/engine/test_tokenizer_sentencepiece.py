"""SentencePiece vocabularies from GGUF metadata: ids of the library itself, and of a slow encoder, on odd texts."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Callable, Mapping
from functools import cache
from itertools import pairwise

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import ModelError
from engine.text.gguf_tokenizer import adds_bos, tokenizer_json
from engine.text.tokenizer import TextCodec

SPACE = "\u2581"
WORDS = [
    "the",
    "then",
    "other",
    "bathe",
    "river",
    "water",
    "winter",
    "terror",
    "error",
    "ababab",
    "aaaa",
    "banana",
    "été",
    "日本語",
    "<s",
    "3.14",
]


@cache
def processor() -> sentencepiece.SentencePieceProcessor:
    """A real vocabulary of a few hundred pieces, trained the way Llama's and Mistral's were."""
    rng = random.Random(0)
    lines = [" ".join(rng.choices(WORDS, k=9)) + rng.choice(["", "  ", "\t.", "!!"]) for _ in range(400)]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=iter(lines),
        model_writer=model,
        model_type="bpe",
        vocab_size=380,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        split_digits=True,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


@cache
def metadata() -> Mapping[str, object]:
    source = processor()
    kinds: list[tuple[Callable[[int], bool], int]] = [
        (source.IsUnknown, 2),
        (source.IsControl, 3),
        (source.IsUnused, 5),
        (source.IsByte, 6),
    ]
    ids = range(source.GetPieceSize())
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [source.IdToPiece(i) for i in ids],
        "tokenizer.ggml.scores": [source.GetScore(i) for i in ids],
        "tokenizer.ggml.token_type": [next((kind for holds, kind in kinds if holds(i)), 1) for i in ids],
    }


@cache
def codec() -> TextCodec:
    return TextCodec(tokenizer_json(metadata()))


class SlowSentencePiece:
    """Joins the two neighbours whose union has the highest score, leftmost first; what is no piece becomes bytes."""

    def __init__(self, scores: Mapping[str, float], ids: Mapping[str, int]) -> None:
        self.scores, self.ids = scores, ids

    def encode(self, text: str) -> list[int]:
        parts = list((SPACE + text).replace(" ", SPACE)) if text else []
        while found := [
            (-self.scores[left + right], place)
            for place, (left, right) in enumerate(pairwise(parts))
            if left + right in self.scores
        ]:
            _, place = min(found)
            parts[place : place + 2] = [parts[place] + parts[place + 1]]
        return [
            i
            for part in parts
            for i in ([self.ids[part]] if part in self.scores else [self.ids[f"<0x{b:02X}>"] for b in part.encode()])
        ]


def slow(values: Mapping[str, object]) -> SlowSentencePiece:
    tokens, scores, types = (values[f"tokenizer.ggml.{key}"] for key in ("tokens", "scores", "token_type"))
    normal = {token: score for token, score, kind in zip(tokens, scores, types, strict=True) if kind == 1}
    return SlowSentencePiece(normal, {token: i for i, token in enumerate(tokens)})


odd_text = st.lists(
    st.one_of(
        st.sampled_from(
            [*WORDS, " ", "  ", "   ", "\n", "\t", SPACE, "ab", "a", "b", "\u0301", "👩‍👧", "\x00", "<0x41>"]
        ),
        st.text(st.characters(codec="utf-8"), max_size=4),
    ),
    max_size=9,
).map("".join)


@settings(max_examples=400, deadline=None)
@given(odd_text)
def test_ids_are_sentencepieces(text: str) -> None:
    ids = codec().encode(text, parse_special=False)
    assert ids == processor().EncodeAsIds(text)
    assert ids == slow(metadata()).encode(text)
    assert codec().decode(ids) == text.replace(SPACE, " ")  # the library has no other sign for it either


def test_common_words_are_pieces() -> None:
    assert len(codec().encode("the water", parse_special=False)) == 2
    assert len(codec().encode("\U0001f9ff", parse_special=False)) == 5  # the space and four bytes


def repetitive_vocabulary(seed: int) -> dict[str, object]:
    """Pieces over two letters, so that most can be made in several ways that overlap."""
    rng = random.Random(seed)
    pieces = ["a", "b", SPACE]
    while len(pieces) < 14:
        union = rng.choice(pieces) + rng.choice(pieces)
        if union not in pieces and len(union) < 7:
            pieces.append(union)
    tokens = [f"<0x{byte:02X}>" for byte in range(256)] + pieces
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 256 + [-float(i) for i in range(len(pieces))],
        "tokenizer.ggml.token_type": [6] * 256 + [1] * len(pieces),
    }


def test_pieces_that_can_be_made_in_several_ways_are_made_as_by_hand() -> None:
    rng = random.Random(1)
    for seed in range(60):
        values = repetitive_vocabulary(seed)
        ours, twin = TextCodec(tokenizer_json(values)), slow(values)
        for _ in range(60):
            text = "".join(rng.choices("aab ", k=rng.randint(1, 24)))
            assert ours.encode(text, parse_special=False) == twin.encode(text), (seed, text)


def spaced_vocabulary(lengths: list[int]) -> dict[str, object]:
    """Runs of spaces with one score, as in Llama's and Mistral's vocabularies, and a few words."""
    pieces = {SPACE: -1e9, "a": -5.0, "b": -6.0, SPACE + "a": -1.0, "ab": -2.0, SPACE + "ab": -3.0}
    pieces |= {SPACE * length: -1e9 for length in lengths}
    tokens = [f"<0x{byte:02X}>" for byte in range(256)] + list(pieces)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 256 + list(pieces.values()),
        "tokenizer.ggml.token_type": [6] * 256 + [1] * len(pieces),
    }


@pytest.mark.parametrize("lengths", [[*range(2, 15), 16], [*range(2, 17)], [2, 3], [2, 4, 8]], ids=str)
def test_runs_of_spaces_with_one_score_grow_from_the_left(lengths: list[int]) -> None:
    values = spaced_vocabulary(lengths)
    ours, twin = TextCodec(tokenizer_json(values)), slow(values)
    for count in range(1, 60):
        for text in (" " * count, "a" + " " * count + "ab" + " " * (count % 7), " " * count + "b"):
            assert ours.encode(text, parse_special=False) == twin.encode(text), text


def test_special_tokens_are_parsed_only_when_asked_and_a_space_follows_them() -> None:
    bos = processor().bos_id()
    assert codec().encode("<s>the", parse_special=True) == [bos, *codec().encode("the", parse_special=False)]
    assert bos not in codec().encode("<s>the", parse_special=False)


def test_files_without_the_space_before_the_text() -> None:
    without = TextCodec(tokenizer_json({**metadata(), "tokenizer.ggml.add_space_prefix": False}))
    assert without.decode(without.encode(" the", parse_special=False)) == " the"
    assert without.encode("", parse_special=False) == []
    assert without.encode(" the", parse_special=False) == codec().encode("the", parse_special=False)


def test_prompts_start_with_bos_unless_the_file_says_otherwise() -> None:
    assert adds_bos(metadata())
    assert not adds_bos({**metadata(), "tokenizer.ggml.add_bos_token": False})


def test_the_same_metadata_gives_the_same_bytes() -> None:
    assert tokenizer_json(metadata()) == tokenizer_json(dict(metadata()))
    assert json.loads(tokenizer_json(metadata()))["model"]["byte_fallback"] is True


def changed(key: str, change: Callable[[list[object]], object]) -> dict[str, object]:
    values = list(metadata()[f"tokenizer.ggml.{key}"])  # type: ignore[call-overload]
    change(values)
    return {**metadata(), f"tokenizer.ggml.{key}": values}


WRONG: dict[str, tuple[Callable[[], dict[str, object]], str]] = {
    "no scores": (lambda: {**metadata(), "tokenizer.ggml.scores": None}, "no usable tokenizer.ggml.scores"),
    "short scores": (lambda: changed("scores", lambda scores: scores.pop()), "no usable tokenizer.ggml.scores"),
    "equal scores": (
        lambda: changed("scores", lambda scores: scores.__setitem__(slice(260, None), [0.0] * 120)),
        "merges of equal score",
    ),
    "a byte is missing": (
        lambda: changed("tokens", lambda tokens: tokens.__setitem__(70, "x")),
        "no byte fallback: <0x43> is missing",
    ),
    "a foreign character": (
        lambda: changed("tokens", lambda tokens: tokens.__setitem__(262, "aλ")),
        "'aλ' has a character without a token",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_vocabulary_that_cannot_be_expressed_exactly_is_refused(case: str) -> None:
    values, message = WRONG[case]
    with pytest.raises(ModelError, match=message):
        tokenizer_json(values())
