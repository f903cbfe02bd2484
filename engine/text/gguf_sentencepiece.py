"""From the scores of a SentencePiece BPE vocabulary ("llama" in GGUF files) to a tokenizer.json with the same ids.

SentencePiece joins, again and again, the two neighbours whose union has the highest score, the leftmost of equals. A
merge list says the same when every union stands in it by its score; where one piece can be made in two ways that
overlap in a text, the way that begins further left has to come first (`_leftmost_first`). Of equal scores a list can
say only one thing: runs of spaces, which Llama's and Mistral's vocabularies score alike (`_space_runs`). What cannot be
said is refused: other equal scores, and pieces with characters that are no pieces themselves.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import groupby, pairwise

from engine.errors import ModelError
from engine.text.gguf_vocabulary import ADDED, TokenType, added_token, strings, token_types

SPACE = "\u2581"


def sentencepiece_json(metadata: Mapping[str, object]) -> bytes:
    """Return the tokenizer.json of a GGUF vocabulary with scores and byte fallback. Raises ModelError."""
    tokens = strings(metadata, "tokenizer.ggml.tokens")
    types = token_types(metadata, len(tokens))
    vocab = {token: i for i, token in enumerate(tokens) if types[i] != TokenType.UNUSED}
    if len(vocab) != sum(kind != TokenType.UNUSED for kind in types):
        raise ModelError("The GGUF file's vocabulary holds the same token twice.")
    missing = [f"<0x{byte:02X}>" for byte in range(256) if f"<0x{byte:02X}>" not in vocab]
    if missing:
        raise ModelError(f"The GGUF file's vocabulary has no byte fallback: {missing[0]} is missing.")
    pieces = {
        tokens[i]: score for i, score in enumerate(_scores(metadata, len(tokens))) if types[i] == TokenType.NORMAL
    }
    space_first = metadata.get("tokenizer.ggml.add_space_prefix", True) is not False
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [added_token(i, tokens[i], kind) for i, kind in enumerate(types) if kind in ADDED],
        "normalizer": _normalizer(space_first),
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": _decoder(space_first),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": _merges(pieces),
        },
    }
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()


def _scores(metadata: Mapping[str, object], count: int) -> Sequence[float]:
    value = metadata.get("tokenizer.ggml.scores")
    if not isinstance(value, Sequence) or len(value) != count or not all(isinstance(score, float) for score in value):
        raise ModelError(f"The GGUF file has no usable tokenizer.ggml.scores for its {count} tokens.")
    return value


def _normalizer(space_first: bool) -> dict[str, object]:
    """Every stretch of text between special tokens starts with a space, and spaces are written as SPACE."""
    steps: list[dict[str, object]] = [{"type": "Prepend", "prepend": SPACE}] if space_first else []
    steps.append({"type": "Replace", "pattern": {"String": " "}, "content": SPACE})
    return {"type": "Sequence", "normalizers": steps}


def _decoder(space_first: bool) -> dict[str, object]:
    steps: list[dict[str, object]] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if space_first:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {"type": "Sequence", "decoders": steps}


def _merges(pieces: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return the merge list of `pieces` and their scores, best first."""
    ways: dict[str, list[int]] = {}
    for piece in pieces:
        foreign = [char for char in piece if char not in pieces]
        if foreign:
            raise ModelError(
                f"The GGUF file's token {piece!r} has a character without a token, which is not supported."
            )
        cuts = [cut for cut in range(1, len(piece)) if piece[:cut] in pieces and piece[cut:] in pieces]
        if cuts:
            ways[piece] = _leftmost_first(piece, cuts)
    ranked = sorted(ways, key=pieces.__getitem__, reverse=True)
    merges: list[tuple[str, str]] = []
    for _, same_score in groupby(ranked, key=pieces.__getitem__):
        group = list(same_score)
        if len(group) == 1:
            merges += [(group[0][:cut], group[0][cut:]) for cut in ways[group[0]]]
        else:
            merges += _space_runs(group, others=ways.keys() - set(group))
    return merges


def _space_runs(group: list[str], others: Collection[str]) -> list[tuple[str, str]]:
    """Return the merges of runs of spaces with one score.

    SentencePiece lets the leftmost run grow as long as it can, then the next. A list that prefers the longest left part
    does so too; instead of trusting that, both are played through. No other piece may hold two spaces, so that nothing
    else takes part.
    """
    lengths = {len(piece) for piece in group}
    parts = sorted({1, *lengths}, reverse=True)
    cuts = [(left, right) for left in parts for right in parts if left + right in lengths]
    ranks = {cut: rank for rank, cut in enumerate(cuts)}
    is_exact = all(
        _joined(count, lambda left, right: ranks.get((left, right)))
        == _joined(count, lambda left, right: 0 if left + right in lengths else None)
        for count in range(1, 3 * max(lengths))
    )
    if set("".join(group)) != {SPACE} or not is_exact or any(2 * SPACE in piece for piece in others):
        raise ModelError("The GGUF file's vocabulary has merges of equal score, which is not supported.")
    return [(SPACE * left, SPACE * right) for left, right in cuts]


def _joined(count: int, rank: Callable[[int, int], int | None]) -> list[int]:
    """Return the lengths that `count` single spaces are joined to: lowest rank first, leftmost of equals."""
    runs = [1] * count
    while True:
        ranked = [(found, at) for at, pair in enumerate(pairwise(runs)) if (found := rank(*pair)) is not None]
        if not ranked:
            return runs
        at = min(ranked)[1]
        runs[at : at + 2] = [runs[at] + runs[at + 1]]


def _leftmost_first(piece: str, cuts: list[int]) -> list[int]:
    """Order the ways to make one piece.

    Two of them compete only in a text A B C with A B = piece = B C. Then the piece begins again len(A) further on, and
    the cut at len(A) goes before the one at len(B). When it does both ways round (piece is a word repeated), a text
    has the longer part on its left, since runs are joined from the left.
    """

    def begins_again(shift: int) -> bool:
        return piece.startswith(piece[shift:])

    later = {cut for cut in cuts if begins_again(len(piece) - cut) and not begins_again(cut)}
    return sorted(cuts, key=lambda cut: (cut in later, -cut))
