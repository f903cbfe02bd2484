"""Keys of prompts that were hashed before: the same as hashed anew, hashed once, and not too many kept."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from engine.protocol import GenerateRequest
from kvstore.keys import KeyChain
from router.key_memo import KeyMemo
from tests.support.hashed_keys import note_hashed_keys

SIZE = 16


def ask(group: str | None, prompt: Sequence[int] = range(100), **fields: object) -> GenerateRequest:
    return GenerateRequest(request_id="r", group_id=group, prompt_ids=list(prompt), **fields)  # type: ignore[arg-type]


def chain(request: GenerateRequest, size: int = SIZE) -> list[bytes]:
    """The keys, hashed anew."""
    return KeyChain(request.cache_scope, size).extend([*request.prompt_ids, *request.resume_ids])


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The keys that were really computed."""
    return note_hashed_keys(monkeypatch)


def test_choices_of_one_prompt_are_hashed_once(hashed: list[bytes]) -> None:
    memo = KeyMemo()
    told = [list(memo.keys(ask("g"), SIZE)) for _ in range(8)]
    assert len(hashed) == 6
    assert told == [chain(ask("g"))] * 8


def test_what_resumes_hashes_only_what_is_new(hashed: list[bytes]) -> None:
    memo = KeyMemo()
    memo.keys(ask("g"), SIZE)
    resumed = ask("g", resume_ids=list(range(60)))
    hashed.clear()
    keys = list(memo.keys(resumed, SIZE))
    assert len(hashed) == 4
    assert keys == chain(resumed)
    assert list(memo.keys(ask("g"), SIZE)) == chain(ask("g")), "the prompt's own keys have not grown"


@pytest.mark.parametrize(
    "other",
    [ask("g", range(99)), ask("g", cache_scope=bytes(32)), ask(None, range(7, 107)), ask("h", range(7, 107))],
    ids=["length", "scope", "none", "group"],
)
def test_another_prompt_gets_its_own_keys(other: GenerateRequest) -> None:
    memo = KeyMemo()
    memo.keys(ask("g"), SIZE)
    assert list(memo.keys(other, SIZE)) == chain(other)
    assert list(memo.keys(ask("g"), 2 * SIZE)) == chain(ask("g"), 2 * SIZE)


def test_prompts_and_keys_are_bounded(hashed: list[bytes]) -> None:
    memo = KeyMemo(max_prompts=3, max_keys=20)
    for number in range(50):
        memo.keys(ask(f"g{number}"), SIZE)
        assert memo.num_keys <= 18
    hashed.clear()
    memo.keys(ask("g49"), SIZE)
    assert not hashed, "the newest are kept"
    memo.keys(ask("g0"), SIZE)
    assert len(hashed) == 6, "the oldest are not"
    assert list(memo.keys(ask("long", range(1000)), SIZE)) == chain(ask("long", range(1000)))
    assert memo.num_keys == 0
    for number in range(50):
        memo.keys(ask(f"short{number}", range(3)), SIZE)
    assert memo.num_keys == 0
