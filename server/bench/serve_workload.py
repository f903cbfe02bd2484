"""What `headrace bench serve` asks: conversations of random words or token ids, the same for the same seed.

Conversation number i depends on the seed and i alone, so the order in which they are sent changes none of them. Knows
no server: how many words make a token comes in as a `WordCalibration`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import msgspec

from server.bench.serve_lengths import Lengths

# Short and common: with a space before them, most vocabularies have each as one token.
_WORDS = (
    "about after again air all along also always and animal answer any are area arm art ask back bad bag ball bank "
    "base be bear beat become bed before begin best better big bird black blue board boat body book both box boy bring "
    "build business busy but buy by call can car card care carry case cat change city class clear close cold color "
    "come common corner cost could country course cover cross cry cut dark day deal deep did different do dog door "
    "down draw dream drive dry each early earth east eat end enough even ever every eye face fact fall family far farm "
    "fast feel few field fill find fine fire first fish five floor fly follow food foot for form four free friend from "
    "full game garden gave get girl give glass go gold good got great green ground group grow had half hand happen "
    "hard has have he head hear heart heat help her here high him his hold home horse hot hour house how hundred idea "
    "if in island job join just keep kind king knew know land language large last late law lead learn leave left"
)
WORDS = _WORDS.split()


class WordCalibration(msgspec.Struct, frozen=True):
    """A prompt of n words has `overhead + n * tokens_per_word` tokens; the overhead is the chat template's."""

    tokens_per_word: float = 1.0
    overhead: float = 0.0

    @classmethod
    def between(cls, words: tuple[int, int], tokens: tuple[int, int]) -> WordCalibration:
        """Draw the line through two probes."""
        slope = (tokens[1] - tokens[0]) / (words[1] - words[0])
        if slope <= 0:
            return cls()
        return cls(slope, max(0.0, tokens[0] - slope * words[0]))

    def words(self, tokens: int, *, opens: bool = True) -> int:
        """How many words fill a prompt of so many tokens, or a part of one that opens no message."""
        rest = tokens - (self.overhead if opens else 0.0)
        return max(1, round(rest / self.tokens_per_word))


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """`prompt` is the length of one turn's own text: shared prefix and earlier turns come on top of it."""

    prompt: Lengths
    output: Lengths
    shared_prefix_tokens: int = 0
    shared_prefixes: int = 1
    turns: int = 1
    token_ids: tuple[int, int] | None = None
    """Half-open range that token ids are drawn from; None asks with words."""
    seed: int = 0


class Turn(msgspec.Struct, frozen=True):
    """Either `text` or `ids` is what the user says."""

    text: str
    ids: list[int] | None
    max_tokens: int


class Conversation(msgspec.Struct, frozen=True):
    index: int
    turns: list[Turn]


class ConversationSource:
    """Makes conversations by number. The warm-up's share the prefixes with the measured ones and nothing else."""

    def __init__(self, workload: Workload, calibration: WordCalibration, *, warm_up: bool = False) -> None:
        self._workload = workload
        self._calibration = calibration
        self._stream = "warm-up" if warm_up else "load"
        self._prefixes = [self._part(f"prefix/{i}") for i in range(workload.shared_prefixes)]

    def conversation(self, index: int) -> Conversation:
        workload = self._workload
        draw = random.Random(f"{workload.seed}/{self._stream}/{index}")
        prefix = draw.choice(self._prefixes)
        turns = [self._turn(draw, prefix if number == 0 else Turn("", None, 0)) for number in range(workload.turns)]
        return Conversation(index, turns)

    def _turn(self, draw: random.Random, prefix: Turn) -> Turn:
        length, max_tokens = self._workload.prompt.draw(draw), self._workload.output.draw(draw)
        if self._workload.token_ids is not None:
            first, end = self._workload.token_ids
            own = [draw.randrange(first, end) for _ in range(length)]
            return Turn("", [*(prefix.ids or ()), *own], max_tokens)
        text = random_text(draw, self._calibration.words(length))
        return Turn(f"{prefix.text} {text}" if prefix.text else text, None, max_tokens)

    def _part(self, name: str) -> Turn:
        """A shared prefix, in the form of a turn."""
        tokens = self._workload.shared_prefix_tokens
        draw = random.Random(f"{self._workload.seed}/{name}")
        if tokens == 0:
            return Turn("", None, 0)
        if self._workload.token_ids is not None:
            return Turn("", [draw.randrange(*self._workload.token_ids) for _ in range(tokens)], 0)
        return Turn(random_text(draw, self._calibration.words(tokens, opens=False)), None, 0)


def random_text(draw: random.Random, words: int) -> str:
    return " ".join(draw.choices(WORDS, k=words))


def arrivals(rate: float, seed: int) -> Iterator[float]:
    """Yield the seconds, from the start, at which a Poisson process of `rate` per second sends. The first is 0."""
    draw = random.Random(f"{seed}/arrivals")
    at_s = 0.0
    while True:
        yield at_s
        at_s += draw.expovariate(rate)
