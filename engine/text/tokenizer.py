"""Text to token ids, and token ids to the exact bytes they stand for.

Built from a tokenizer.json alone. Owns the table of every token's bytes that the text machine runs on. Knows nothing of
requests, streams or chat templates.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import cast

import msgspec
from tokenizers import Tokenizer

from engine.errors import ModelError, RequestError
from engine.protocol import TextAssets
from engine.text.byte_level import piece_bytes

_Json = Mapping[str, object]

_MAX_VOCABULARY = 2**24
_METASPACE = "\u2581"  # SentencePiece writes a space as this lower one eighth block.


class TextCodec:
    """One model's text encoding; immutable, shared by all requests and threads.

    `vocab_size` may be larger than the tokenizer's own: models pad their embeddings, and the ids of the padding stand
    for no text.
    """

    def __init__(self, tokenizer_json: bytes, *, bos_id: int | None = None, vocab_size: int | None = None) -> None:
        """`bos_id` is given when raw prompts start with it. Raises ModelError."""
        self._source = tokenizer_json
        self._tokenizer = _load(tokenizer_json)
        self._literal_tokenizer: Tokenizer | None = None
        self._bos_id = bos_id
        vocabulary = _vocabulary(json.loads(tokenizer_json))
        known = max(vocabulary.pieces, default=-1) + 1
        if known > _MAX_VOCABULARY:
            raise ModelError(f"The tokenizer has a token of id {known - 1}, which is no vocabulary's.")
        self.vocab_size = max(known, vocab_size or 0)
        self._special = vocabulary.special
        self._special_texts = vocabulary.special_texts
        self._strips_first_space = vocabulary.strips_first_space
        shown = [b""] * self.vocab_size
        for token_id, piece in vocabulary.pieces.items():
            shown[token_id] = piece
        self._shown: Sequence[bytes] = shown
        self._longest_token = max(map(len, shown), default=1) or 1
        self._plain: Sequence[bytes] = [b"" if i in self._special else piece for i, piece in enumerate(shown)]

    @classmethod
    def from_assets(cls, text: TextAssets, assets: Mapping[str, bytes], *, vocab_size: int | None = None) -> TextCodec:
        """`assets` are files by digest, as `Engine.fetch_asset` returns them; `vocab_size` is the model's."""
        bos_id = text.bos_id if text.add_bos else None
        return cls(assets[text.tokenizer.digest], bos_id=bos_id, vocab_size=vocab_size)

    def encode(self, text: str, *, parse_special: bool, add_bos: bool = False, param: str = "prompt") -> list[int]:
        """Return the text's ids. With `parse_special`, "<|im_end|>" in the text is that token, otherwise it is letters.

        Chat prompts and, as everywhere, raw completion prompts parse them. `add_bos` prepends the BOS token if the
        model wants one; it does not look whether the text starts with it. Raises RequestError naming `param` for text
        that is not Unicode (a lone surrogate).
        """
        tokenizer = self._tokenizer if parse_special or not self._may_hold_special(text) else self._literal()
        try:
            # A batch of one: the library's plain `encode` keeps the interpreter's lock, and with it every other thread,
            # for as long as it takes.
            (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=False)
        except TypeError as error:
            raise RequestError("The text holds a lone surrogate, which is no character.", param=param) from error
        except BaseException as error:
            if not _is_the_library_s(error):
                raise
            raise RequestError(
                f"The model's tokenizer cannot read this text: {_reason(error)}.", param=param
            ) from error
        ids: list[int] = encoding.ids
        return [self._bos_id, *ids] if add_bos and self._bos_id is not None else ids

    @property
    def longest_token(self) -> int:
        """Bytes, and so the most characters, that one token stands for: what bounds a text's tokens from below."""
        return self._longest_token

    def decode(self, token_ids: Iterable[int], *, show_special: bool = False) -> str:
        """Return the text of a whole sequence. What is not UTF-8 becomes U+FFFD. Raises RequestError for foreign ids.

        A vocabulary whose encoder puts a space before the text has it taken away again here (not so in a stream, where
        the first token continues a prompt).
        """
        text = b"".join(self.token_bytes(i, show_special=show_special) for i in token_ids).decode(errors="replace")
        return text.removeprefix(" ") if self._strips_first_space else text

    def token_bytes(self, token_id: int, *, show_special: bool = False) -> bytes:
        """Return the token's bytes, which need not be whole characters; b"" for special and padding tokens."""
        if not 0 <= token_id < self.vocab_size:
            raise RequestError(
                f"Token id {token_id} is outside of the vocabulary [0, {self.vocab_size}).",
                param="tokens",
                value=token_id,
            )
        return (self._shown if show_special else self._plain)[token_id]

    def token_text(self, token_id: int) -> str:
        """Return the token as a reader of logprobs sees it: special ones by name, partial characters as U+FFFD."""
        return self.token_bytes(token_id, show_special=True).decode(errors="replace")

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special

    def byte_table(self, *, show_special: bool = False) -> Sequence[bytes]:
        """Every token's bytes by id, for callers that decode token by token."""
        return self._shown if show_special else self._plain

    def _may_hold_special(self, text: str) -> bool:
        return self._special_texts is None or self._special_texts.search(text) is not None

    def _literal(self) -> Tokenizer:
        """A second tokenizer that reads special tokens as letters: the switch is state of the object, not of a call."""
        if self._literal_tokenizer is None:
            literal = _load(self._source)
            literal.encode_special_tokens = True
            self._literal_tokenizer = literal
        return self._literal_tokenizer


def _load(source: bytes) -> Tokenizer:
    try:
        _check_character_maps(source)
        tokenizer = Tokenizer.from_buffer(source)
    except BaseException as error:
        if not _is_the_library_s(error):
            raise
        raise ModelError(
            f"The tokenizer cannot be read: {_reason(error)}.",
            hint="Is tokenizer.json whole, and of a format that the installed `tokenizers` package knows?",
        ) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _is_the_library_s(error: BaseException) -> bool:
    """It raises Exception itself, and panics that are none."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _reason(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _check_character_maps(source: bytes) -> None:
    """Raise ValueError for a map that claims more bytes than it has: the library would ask for them, and abort."""
    if b"precompiled_charsmap" not in source:
        return
    pending: list[object] = [json.loads(source)]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            pending += value.values()
            if "precompiled_charsmap" in value:
                raw = base64.b64decode(str(value["precompiled_charsmap"]))
                if len(raw) < 4 or int.from_bytes(raw[:4], "little") > len(raw) - 4:
                    raise ValueError("a precompiled character map is cut")
        elif isinstance(value, list):
            pending += value


class _Vocabulary(msgspec.Struct, frozen=True):
    """`pieces` are the bytes of each known id; `special` are the ids that are not text. A text in which `special_texts`
    finds nothing has none of them; None when that cannot be told from the text as it is written."""

    pieces: dict[int, bytes]
    special: frozenset[int]
    special_texts: re.Pattern[str] | None
    strips_first_space: bool


def _vocabulary(document: _Json) -> _Vocabulary:
    added = [cast("_Json", token) for token in cast("Sequence[object]", document.get("added_tokens") or ())]
    model = cast("_Json", document["model"])
    decoders = list(_flatten(document.get("decoder")))
    to_bytes = _piece_decoder(decoders)
    pieces = {token_id: to_bytes(piece) for piece, token_id in _model_pieces(model)}
    # Added tokens are matched in the raw text and stand for it as they are.
    pieces.update({cast(int, token["id"]): cast(str, token["content"]).encode() for token in added})
    special = [token for token in added if token.get("special")]
    ids = frozenset(cast(int, token["id"]) for token in special)
    return _Vocabulary(pieces, ids, _texts_of(special), any(map(_strips_first_space, decoders)))


def _texts_of(special: Sequence[_Json]) -> re.Pattern[str] | None:
    """Return what finds any of these tokens. A normalised one is looked for in a text that was changed before."""
    if any(token.get("normalized") for token in special):
        return None
    return re.compile("|".join(re.escape(cast(str, token["content"])) for token in special) or r"(?!)")


def _model_pieces(model: _Json) -> Iterator[tuple[str, int]]:
    """BPE has a mapping from piece to id, Unigram a list of (piece, score)."""
    vocab = model.get("vocab")
    if isinstance(vocab, dict):
        yield from vocab.items()
    elif isinstance(vocab, list):
        yield from ((entry[0], i) for i, entry in enumerate(vocab))
    else:
        raise ModelError(f"The tokenizer's model {model.get('type')!r} is not supported.")


def _flatten(decoder: object) -> Iterator[_Json]:
    if decoder is None:
        return
    step = cast("_Json", decoder)
    if step["type"] == "Sequence":
        for inner in cast("Sequence[object]", step["decoders"]):
            yield from _flatten(inner)
    else:
        yield step


def _piece_decoder(decoders: Sequence[_Json]) -> Callable[[str], bytes]:
    """Return what turns one vocabulary entry into bytes: two families exist that can do it token by token."""
    kinds = [step["type"] for step in decoders]
    if "ByteLevel" in kinds:
        return piece_bytes
    spaced = any(
        step["type"] == "Metaspace"
        or (step["type"] == "Replace" and step.get("pattern") == {"String": _METASPACE} and step.get("content") == " ")
        for step in decoders
    )
    if spaced:
        return _metaspace_byte_piece if "ByteFallback" in kinds else _metaspace_piece
    raise ModelError(
        f"The tokenizer's decoder {kinds or 'none'} is not supported.",
        hint="Supported: byte-level BPE, and SentencePiece kinds with or without byte fallback.",
    )


def _strips_first_space(step: _Json) -> bool:
    if step["type"] == "Metaspace":
        return step.get("prepend_scheme", "always") != "never" and step.get("add_prefix_space") is not False
    return step["type"] == "Strip" and step.get("content") == " " and step.get("start") == 1


def _metaspace_piece(piece: str) -> bytes:
    return piece.replace(_METASPACE, " ").encode()


def _metaspace_byte_piece(piece: str) -> bytes:
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        try:
            return bytes([int(piece[3:5], 16)])
        except ValueError:
            pass
    return _metaspace_piece(piece)
