"""What is hashed of prompts."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvstore.keys import KeyChain


def note_hashed_keys(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Return the list of all block keys that chains compute from here on."""
    computed: list[bytes] = []
    extend = KeyChain.extend

    def noted(chain: KeyChain, token_ids: Sequence[int]) -> list[bytes]:
        known = len(chain.keys)
        keys = extend(chain, token_ids)
        computed.extend(keys[known:])
        return keys

    monkeypatch.setattr(KeyChain, "extend", noted)
    return computed
