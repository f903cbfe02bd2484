"""Who may serve whom."""

from __future__ import annotations

import logging

import pytest

from engine.protocol import AssetRef, TextAssets
from router.registry.compat import CompatibilityGate, compatibility_digest, probe_digest
from tests.support.infos import engine_info
from tests.support.registries import ids, worker

A, B = "a" * 64, "b" * 64


@pytest.mark.parametrize(
    "change",
    [
        {"weights_digest": "1" * 64},
        {"architecture": "other"},
        {"dtype": "bfloat16"},
        {"block_size": 32},
        {"eos_ids": (0, 1)},
        {"text": TextAssets(tokenizer=AssetRef("1", 0))},
        {"text": TextAssets(tokenizer=AssetRef("0", 0), chat_template=AssetRef("2", 0))},
        {"text": TextAssets(tokenizer=AssetRef("0", 0), bos_id=1, add_bos=True)},
    ],
)
def test_what_changes_tokens_changes_the_digest(change: dict[str, object]) -> None:
    assert compatibility_digest(engine_info(**change)) != compatibility_digest(engine_info())


def test_what_does_not_change_them_does_not() -> None:
    other = engine_info(model="alias", incarnation="9", device="cuda", operators="triton", max_running=3, threads=7)
    assert compatibility_digest(other) == compatibility_digest(engine_info())


def test_a_probe_replaces_the_templates_text() -> None:
    text = TextAssets(tokenizer=AssetRef("0", 0), chat_template=AssetRef("2", 0))
    commented = TextAssets(tokenizer=AssetRef("0", 0), chat_template=AssetRef("3", 0))
    probe = probe_digest([[1, 2], [3]])
    assert compatibility_digest(engine_info(text=text), probe) == compatibility_digest(
        engine_info(text=commented), probe
    )
    assert compatibility_digest(engine_info(text=text), probe) != compatibility_digest(
        engine_info(text=text), probe_digest([[1], [2, 3]])
    )


def test_the_first_ready_worker_sets_the_digest_and_a_mismatch_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    gate = CompatibilityGate()
    early = worker("w0", state="starting", compatibility="")
    assert gate.admit([early]) == (early,)
    assert gate.expected("tiny") is None
    records = [early, worker("w1", compatibility=A), worker("w2", compatibility=B)]
    with caplog.at_level(logging.WARNING):
        assert ids(gate.admit(records)) == ["w0", "w1"]
        # The odd one does not take over by coming first in the list.
        assert ids(gate.admit([worker("w0", compatibility=B), records[1]])) == ["w1"]
        assert ids(gate.admit(records)) == ["w0", "w1"]
    assert [A in message and B in message for message in caplog.messages] == [True, True]


def test_models_do_not_mix() -> None:
    gate = CompatibilityGate()
    records = [worker("w0", model="one", compatibility=A), worker("w1", model="two", compatibility=B)]
    assert ids(gate.admit(records)) == ["w0", "w1"]


def test_a_digest_holds_while_somebody_has_it_and_is_given_up_after() -> None:
    gate = CompatibilityGate()
    gate.admit([worker("w0", compatibility=A)])
    assert ids(gate.admit([worker("w0", compatibility=A, state="draining"), worker("w1", compatibility=B)])) == ["w0"]
    assert ids(gate.admit([worker("w1", compatibility=B)])) == ["w1"]
    assert gate.expected("tiny") == B


def test_a_configured_digest_is_never_given_up() -> None:
    gate = CompatibilityGate({"tiny": A})
    assert gate.admit([worker("w1", compatibility=B)]) == ()
    assert ids(gate.admit([worker("w1", compatibility=B), worker("w2", compatibility=A)])) == ["w2"]


def test_a_ready_worker_without_a_digest_is_refused() -> None:
    assert CompatibilityGate().admit([worker(compatibility="")]) == ()
