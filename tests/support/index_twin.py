"""The prefix index as plain dictionaries: what router/index.py must answer as long as nothing is evicted."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from kvstore.events.digest import Digest
from kvstore.events.media import Tier
from router.index_planes import PLANES
from router.values import Hit, Query

TIERS: tuple[Tier, ...] = ("device", "ram", "disk", "remote")
SPECULATION_TTL_S = 2.0


class IndexTwin:
    """Blocks by target and tier. `clock` is monotonic, in seconds."""

    def __init__(self, max_blocks: int, clock: Callable[[], float]) -> None:
        self.max_blocks = max_blocks
        self._clock = clock
        self._held: dict[str, dict[Tier, dict[bytes, None]]] = {}
        self._expected: dict[str, dict[bytes, float]] = {}

    @property
    def targets(self) -> Collection[str]:
        return self._held.keys()

    def add_target(self, target_id: str) -> None:
        """Begin to know a target, with nothing in it. One that is known keeps what it has."""
        self._held.setdefault(target_id, {tier: {} for tier in PLANES})
        self._expected.setdefault(target_id, {})

    def drop_target(self, target_id: str) -> None:
        """Forget a target. Unknown ones are ignored."""
        self._held.pop(target_id, None)
        self._expected.pop(target_id, None)

    def clear(self, target_id: str) -> None:
        """The target has nothing any more."""
        if target_id in self._held:
            self.drop_target(target_id)
            self.add_target(target_id)

    def apply(
        self, target_id: str, stored: Sequence[bytes] = (), removed: Sequence[bytes] = (), tier: Tier = "device"
    ) -> None:
        """Note changes of one tier, `removed` before `stored`. Events of unknown targets are late: ignored."""
        if target_id not in self._held:
            return
        held = self._held[target_id][tier]
        for key in removed:
            held.pop(key, None)
        held.update(dict.fromkeys(stored))

    def replace(self, target_id: str, content: Mapping[Tier, Sequence[bytes]]) -> None:
        """The target has exactly this."""
        self.clear(target_id)
        for tier, keys in content.items():
            self.apply(target_id, stored=keys, tier=tier)

    def speculate(self, target_id: str, keys: Iterable[bytes], ttl_s: float = SPECULATION_TTL_S) -> None:
        """A request with these keys was sent there: for `ttl_s` they count as on its device."""
        if target_id in self._expected and ttl_s > 0:
            expected, end = self._expected[target_id], self._clock() + ttl_s
            expected.update((key, max(end, expected.get(key, end))) for key in keys)

    def lookup(self, query: Query) -> dict[str, Hit]:
        """Return what each target has of the prompt's beginning. Targets that have nothing are left out.

        The device serves what it has up to its first gap; from there on the other tiers do, up to theirs. The last
        token of a prompt is always computed.
        """
        return {target_id: hit for target_id in self._held if (hit := self._hit(target_id, query)).tokens > 0}

    def _hit(self, target_id: str, query: Query) -> Hit:
        held, expected, now_s = self._held[target_id], self._expected[target_id], self._clock()
        counts = dict.fromkeys((*TIERS, "speculative"), 0)
        real = held["device"].keys() | held["device_run"].keys()
        ends = held["device"].keys() | held["device_end"].keys()
        device_blocks = 0
        for index, key in enumerate(query.keys):
            is_expected = expected.get(key, now_s) > now_s
            if key not in real and not is_expected:
                break
            if key in ends or is_expected:
                device_blocks = index + 1
        for index, key in enumerate(query.keys):
            on_device = index < device_blocks
            tier = "device" if on_device else next((t for t in TIERS[1:] if key in held[t]), None)
            if tier is None:
                break
            counts[tier] += query.block_size
            counts["speculative"] += query.block_size * (on_device and key not in real)
        over = max(0, sum(counts[tier] for tier in TIERS) - (query.prompt_tokens - 1))
        for tier in reversed(TIERS):
            less = min(over, counts[tier])
            counts[tier] -= less
            over -= less
        counts["speculative"] = min(counts["speculative"], counts["device"])
        return Hit(**counts)

    def digest(self, target_id: str) -> dict[Tier, Digest]:
        """Return the digest of what events said that each tier holds, speculation aside. Empty tiers are left out."""
        held = self._held.get(target_id, {})
        return {tier: Digest.of(keys) for tier, keys in held.items() if keys}
