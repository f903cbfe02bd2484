"""Policies by the name that settings use."""

from __future__ import annotations

import random
from collections.abc import Callable

from engine.errors import ConfigError
from router.policies.prefix import Prefix
from router.policies.prefix_approx import PrefixApprox
from router.policies.session import Session
from router.policies.sglang import Sglang
from router.policies.simple import LeastKV, LeastRequests, LeastTokens, PowerOfTwo, Random, RoundRobin
from router.values import Policy

DEFAULT_POLICY = "prefix"

_MAKERS: dict[str, Callable[[Callable[[], float], random.Random], Policy]] = {
    "prefix": lambda clock, rng: Prefix(),
    "prefix_approx": lambda clock, rng: PrefixApprox(clock),
    "session": lambda clock, rng: Session(),
    "least_tokens": lambda clock, rng: LeastTokens(),
    "least_requests": lambda clock, rng: LeastRequests(),
    "least_kv": lambda clock, rng: LeastKV(),
    "power_of_two": lambda clock, rng: PowerOfTwo(rng),
    "round_robin": lambda clock, rng: RoundRobin(),
    "random": lambda clock, rng: Random(rng),
    "sglang": lambda clock, rng: Sglang(),
}
POLICY_NAMES = tuple(_MAKERS)


def make_policy(name: str, clock: Callable[[], float], rng: random.Random) -> Policy:
    """Return a new policy. `clock` gives monotonic seconds. Raises ConfigError for an unknown name."""
    maker = _MAKERS.get(name)
    if maker is None:
        raise ConfigError(f"There is no routing policy {name!r}.", hint=f"Policies are: {', '.join(POLICY_NAMES)}.")
    return maker(clock, rng)
