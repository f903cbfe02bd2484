"""Distributions of lengths in tokens, written as one word on the command line.

`512` and `fixed:512`, `uniform:LOW:HIGH` (both ends included), `lognormal:MEDIAN:SIGMA` with an optional `:MAX`.
"""

from __future__ import annotations

import math
import random
from typing import Literal

import msgspec

FORMS = "512, uniform:64:256 or lognormal:300:0.8:4000"


class Lengths(msgspec.Struct, frozen=True):
    """`low` is the length, the lower end or the median; `high` the upper end, None where there is none."""

    kind: Literal["fixed", "uniform", "lognormal"]
    low: int
    high: int | None = None
    sigma: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """Raise ValueError, with what may be written, for anything else."""
        kind, *numbers = text.split(":") if ":" in text else ("fixed", text)
        try:
            match kind, numbers:
                case "fixed", [length]:
                    lengths = cls("fixed", int(length))
                case "uniform", [low, high]:
                    lengths = cls("uniform", int(low), int(high))
                case "lognormal", [median, sigma]:
                    lengths = cls("lognormal", int(median), None, float(sigma))
                case "lognormal", [median, sigma, longest]:
                    lengths = cls("lognormal", int(median), int(longest), float(sigma))
                case _:
                    raise ValueError
            if lengths.low < 1 or (lengths.high is not None and lengths.high < lengths.low):
                raise ValueError
            if not 0 <= lengths.sigma <= 10:
                raise ValueError
        except ValueError:
            raise ValueError(f"{text!r} is no distribution of lengths; write {FORMS}.") from None
        return lengths

    def draw(self, random_source: random.Random) -> int:
        if self.kind == "fixed":
            return self.low
        if self.kind == "uniform":
            assert self.high is not None
            return random_source.randint(self.low, self.high)
        length = round(random_source.lognormvariate(math.log(self.low), self.sigma))
        return max(1, length if self.high is None else min(length, self.high))
