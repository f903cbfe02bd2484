"""The engine's end of the wire against raw sockets: credit, malformed frames, peers that leave, ids used twice."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.errors import DrainingError, LoadingError, PromptTooLongError, RequestError, RequestFailedError
from engine.protocol import GenerateRequest, SamplingParams, TokenOutput
from engine.wire import messages as wire
from engine.wire.errors import from_wire
from engine.wire.merge import merge_outputs
from tests.support.scripted_engine import BUG, scripted_tokens
from tests.support.wire_bench import Bench


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with Bench(f"ipc://{tmp_path}/e") as bench:
        yield bench


def request(request_id: str = "r", seed: int = 1, count: int = 10, **fields: Any) -> GenerateRequest:  # noqa: ANN401
    return GenerateRequest(
        request_id=request_id,
        prompt_ids=fields.pop("prompt_ids", [1, 2]),
        sampling=SamplingParams(seed=seed, max_tokens=count),
        **fields,
    )


def outputs_of(messages: list[wire.Outputs], request_id: str = "r") -> list[TokenOutput]:
    return [output for message in messages for output in message.batch if output.request_id == request_id]


def test_a_peer_is_told_the_incarnation_and_how_far_loading_is(bench: Bench) -> None:
    bench.host.set_status(wire.Status("loading", 0.5, "weights"))
    peer = bench.peer()
    (welcome,) = peer.received(wire.Welcome)
    assert welcome == wire.Welcome(wire.WIRE_VERSION, bench.host.incarnation)
    assert peer.received(wire.Status)[0] == wire.Status("loading", 0.5, "weights")
    bench.serve()
    assert peer.received(wire.Status)[-1].state == "ready"


def test_a_request_before_the_model_is_loaded_is_refused_with_the_progress(bench: Bench) -> None:
    bench.host.set_status(wire.Status("loading", 0.5, "weights"))
    peer = bench.welcomed()
    peer.send(wire.Submit(request()))
    error = from_wire(peer.received(wire.Refused)[0].error)
    assert isinstance(error, LoadingError)
    assert error.progress == 0.5


def test_one_message_carries_a_step(bench: Bench) -> None:
    bench.serve()
    peer = bench.welcomed()
    for number in range(64):
        peer.send(wire.Submit(request(f"r{number}", count=3)))
    bench.pump_until(lambda: bench.host.num_running == 64)
    bench.run_steps(3)
    steps = peer.received(wire.Outputs, 3)
    assert [len(step.batch) for step in steps] == [64, 64, 64]
    assert bench.host.num_running == 0


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        (request(prompt_ids=[]), RequestError),
        (request(prompt_ids=[1] * 5000), PromptTooLongError),
        (request(prompt_ids=[BUG]), RequestFailedError),
    ],
)
def test_a_refusal_rebuilds_the_error_and_harms_nobody_else(
    bench: Bench, bad: GenerateRequest, error: type[Exception]
) -> None:
    bench.serve()
    peer = bench.welcomed()
    peer.send(wire.Submit(request("good", count=2)))
    peer.send(wire.Submit(bad))
    (refused,) = peer.received(wire.Refused)
    assert (refused.request_id, refused.attempt) == ("r", 0)
    assert type(from_wire(refused.error)) is error
    bench.run_steps(2)
    assert merge_outputs(outputs_of(peer.received(wire.Outputs, 2), "good")).token_ids == scripted_tokens(1, 2)
    assert bench.host.num_running == 0


def test_a_peer_without_credit_gets_everything_once_it_grants_some(bench: Bench) -> None:
    bench.serve()
    slow, quick = bench.welcomed(credit=3), bench.welcomed()
    for number in range(4):
        slow.send(wire.Submit(request(f"r{number}", seed=number, count=500)))
    quick.send(wire.Submit(request("quick", seed=9, count=500)))
    bench.pump_until(lambda: bench.host.num_running == 5)
    bench.run_steps(500)

    assert len(slow.received(wire.Outputs, 3)) == 3
    assert bench.host.num_held == 4, "one merged output per request waits, and no more"
    assert merge_outputs(outputs_of(quick.received(wire.Outputs, 500), "quick")).token_ids == scripted_tokens(9, 500)

    slow.send(wire.Credit(1))
    (rest,) = slow.received(wire.Outputs)
    for number in range(4):
        (output,) = outputs_of([rest], f"r{number}")
        assert output.offset == 3
        assert output.token_ids == scripted_tokens(number, 500)[3:]
        assert output.finish_reason == "length"
    bench.host.pump(0.05)
    assert slow.waiting(wire.Outputs) == []
    assert bench.host.num_held == 0


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.integers(1, 4))
def test_outputs_stay_contiguous_for_every_way_of_granting(bench: Bench, grants: list[int], credit: int) -> None:
    bench.serve()
    peer = bench.welcomed(credit=credit)
    peer.send(wire.Submit(request(count=25)))
    bench.pump_until(lambda: bench.host.num_running == 1)
    for grant in grants:
        if grant:
            peer.send(wire.Credit(grant))
        bench.run_steps(1)
    bench.run_steps(25)
    peer.send(wire.Credit(100))
    outputs: list[TokenOutput] = []
    while not outputs or outputs[-1].finish_reason is None:
        outputs += outputs_of(peer.received(wire.Outputs))
    position = 0
    for output in outputs:
        assert output.offset == position
        position += len(output.token_ids)
    assert merge_outputs(outputs).token_ids == scripted_tokens(1, 25)
    assert [output.finish_reason for output in outputs].count("length") == 1
    peer.close()
    bench.peers.remove(peer)


def test_requests_of_a_peer_that_left_are_aborted_also_when_they_are_silent(bench: Bench) -> None:
    bench.serve()
    leaving, staying = bench.welcomed(credit=1), bench.welcomed()
    for number in range(10):
        leaving.send(wire.Submit(request(f"r{number}", count=10_000)))
    staying.send(wire.Submit(request("stays", count=10_000)))
    bench.pump_until(lambda: bench.host.num_running == 11)
    bench.run_steps(5)
    leaving.close()
    bench.peers.remove(leaving)
    # No step runs meanwhile: nothing but the probe can notice.
    bench.pump_until(lambda: bench.host.num_peers == 1)
    assert bench.host.num_running == 1
    assert bench.core.load().running == 1
    assert bench.host.num_held == 0
    assert bench.host.counters["vanished_peers"] == 1


def test_two_peers_may_use_the_same_id(bench: Bench) -> None:
    bench.serve()
    first, second = bench.welcomed(), bench.welcomed()
    first.send(wire.Submit(request(seed=1)))
    second.send(wire.Submit(request(seed=2)))
    bench.pump_until(lambda: bench.host.num_running == 2)
    bench.run_steps(2)
    second.send(wire.Abort("r"))
    bench.pump_until(lambda: bench.host.num_running == 1)
    bench.run_steps(8)
    assert merge_outputs(outputs_of(first.received(wire.Outputs, 10))).token_ids == scripted_tokens(1, 10)
    seen = merge_outputs(outputs_of(second.received(wire.Outputs, 3)))
    assert (seen.token_ids, seen.finish_reason) == (scripted_tokens(2, 2), "abort")


def test_an_id_can_be_used_again_right_after_its_abort(bench: Bench) -> None:
    bench.serve()
    peer = bench.welcomed()
    peer.send(wire.Submit(request(seed=1)))
    bench.pump_until(lambda: bench.host.num_running == 1)
    bench.run_steps(1)
    peer.send(wire.Abort("r"))
    peer.send(wire.Submit(request(seed=2, attempt=1)))
    bench.pump_until(lambda: [running.attempt for running, _ in bench.core._running.values()] == [1])
    bench.run_steps(10)
    outputs = outputs_of(peer.received(wire.Outputs, 12))
    assert [o.finish_reason for o in outputs if o.attempt == 0] == [None, "abort"]
    assert merge_outputs([o for o in outputs if o.attempt == 1]).token_ids == scripted_tokens(2, 10)


def test_an_id_that_is_running_is_refused(bench: Bench) -> None:
    bench.serve()
    peer = bench.welcomed()
    peer.send(wire.Submit(request()))
    peer.send(wire.Submit(request()))
    error = from_wire(peer.received(wire.Refused)[0].error)
    assert isinstance(error, RequestError)
    assert error.param == "request_id"
    assert bench.host.num_running == 1


def test_another_version_is_refused_with_both_versions(bench: Bench) -> None:
    peer = bench.peer(version=99)
    assert peer.received(wire.VersionRefused) == [wire.VersionRefused(wire.WIRE_VERSION, 99)]
    assert bench.host.num_peers == 0


def test_who_has_not_said_hello_is_told_to_connect_anew(bench: Bench) -> None:
    bench.serve()
    peer = bench.peer(version=99)
    peer.send(wire.Submit(request()))
    assert peer.received(wire.Bye)
    assert bench.host.num_running == 0


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(frames=st.lists(st.binary(max_size=64), min_size=1, max_size=3))
def test_noise_is_counted_and_dropped(bench: Bench, frames: list[bytes]) -> None:
    bench.serve()
    if not bench.peers:
        bench.welcomed()
    (peer,) = bench.peers
    before = bench.host.counters["malformed_frames"]
    peer.socket.send_multipart(frames)
    bench.pump_until(lambda: bench.host.counters["malformed_frames"] == before + 1)
    peer.send(wire.GetLoad(7))
    assert peer.received(wire.LoadReply)[0].call_id == 7


@pytest.mark.parametrize(
    "frame",
    [
        [2, {"request_id": "r"}],
        [2, {"request_id": 5, "prompt_ids": [1]}],
        [2, {"request_id": "r", "prompt_ids": ["a"]}],
        [3, "r"],
        [5, -1.5],
        [35, []],
        {},
    ],
)
def test_messages_with_wrong_fields_are_counted_and_dropped(bench: Bench, frame: object) -> None:
    bench.serve()
    peer = bench.welcomed()
    peer.socket.send(msgspec.msgpack.encode(frame))
    bench.pump_until(lambda: bench.host.counters["malformed_frames"] == 1)
    assert bench.host.num_peers == 1


@pytest.mark.parametrize(
    "frame",
    [
        b"\x92\x02\x81\xa1x" + b"\x91" * 1_000_000,
        b"\x92\x02\x81\xa1x" + b"\x81\xa1a" * 1_000_000,
        b"\x93\x04\xa1a" + b"\x91" * 1_000_000,
        b"\x92\x02\x82\xaarequest_id\xa1a\xaaprompt_ids\xdd\xff\xff\xff\xff\x01",
        b"\x92\x04\xdb\xff\xff\xff\xffa",
        b"\x92\x02\xdf\xff\xff\xff\xff",
    ],
    ids=[
        "deep arrays",
        "deep maps",
        "deep rest",
        "array that claims 4 G",
        "text that claims 4 GB",
        "map that claims 4 G",
    ],
)
def test_frames_that_claim_much_or_nest_deep_are_counted_and_dropped(bench: Bench, frame: bytes) -> None:
    bench.serve()
    peer = bench.welcomed()
    peer.socket.send(frame)
    bench.pump_until(lambda: bench.host.counters["malformed_frames"] == 1)
    peer.send(wire.GetLoad(7))
    assert peer.received(wire.LoadReply)[0].call_id == 7


def test_who_grants_no_credit_is_refused_before_what_waits_for_it_grows_too_large(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.wire.host.HELD_LIMIT_REQUESTS", 5)
    bench.serve()
    peer, other = bench.welcomed(credit=1), bench.welcomed()
    for number in range(8):
        peer.send(wire.Submit(request(f"r{number}")))
        peer.send(wire.Abort(f"r{number}"))
    refused = peer.received(wire.Refused)
    bench.pump_until(lambda: bench.host.num_held == 5)
    assert [message.error.type for message in refused] == ["PressureError"] * len(refused)
    other.send(wire.Submit(request(count=1)))
    bench.pump_until(lambda: bench.host.num_running == 1)
    peer.send(wire.Credit(10))
    bench.pump_until(lambda: bench.host.num_held == 0)


def test_a_giant_frame_costs_its_sender_the_connection_and_nobody_else(bench: Bench) -> None:
    bench.serve()
    bad, good = bench.welcomed(), bench.welcomed()
    bad.socket.send(bytes(wire.MAX_CLIENT_FRAME_BYTES + 1))
    bench.pump_until(lambda: bench.host.num_peers == 1)
    good.send(wire.Submit(request(count=1)))
    bench.pump_until(lambda: bench.host.num_running == 1)
    bench.run_steps(1)
    assert good.received(wire.Outputs)


def test_a_flood_does_not_keep_the_engine_from_its_step(bench: Bench) -> None:
    bench.serve()
    peer = bench.welcomed()
    for _ in range(5000):
        peer.send(wire.Finish("unknown", 0))
    peer.send(wire.Submit(request(count=1)))
    pumps = 0
    while bench.host.num_running == 0:
        bench.host.pump(1.0)
        pumps += 1
    assert pumps >= 4


@pytest.mark.parametrize("behind_s", [-3600.0, 3600.0])
def test_a_peer_whose_clock_is_another_gets_the_time_that_it_asks_for(bench: Bench, behind_s: float) -> None:
    bench.serve()
    peer = bench.welcomed()
    its_now_s = time.time() - behind_s
    peer.send(wire.Submit(request("told", count=5, deadline_unix_s=its_now_s + 60), its_now_s))
    peer.send(wire.Submit(request("untold", count=5, deadline_unix_s=its_now_s + 60)))
    bench.pump_until(lambda: len(bench.core.running) == 2)
    told, untold = bench.core.running
    assert told.deadline_unix_s is not None
    assert 0 < told.deadline_unix_s - time.time() <= 60
    assert untold.deadline_unix_s == its_now_s + 60


def test_draining_refuses_and_lets_run_what_runs(bench: Bench) -> None:
    bench.serve()
    peer = bench.welcomed()
    peer.send(wire.Submit(request("old", count=5)))
    peer.send(wire.Drain(3))
    peer.send(wire.Submit(request("new")))
    assert isinstance(from_wire(peer.received(wire.Refused)[0].error), DrainingError)
    bench.run_steps(5)
    assert outputs_of(peer.received(wire.Outputs, 5), "old")[-1].finish_reason == "length"


def test_an_operator_ends_a_request_of_any_peer_with_all_its_choices(bench: Bench) -> None:
    bench.serve()
    one, other, operator = bench.welcomed(), bench.welcomed(), bench.welcomed()
    for peer, name in [(one, "a-0-0"), (one, "a-0-1"), (one, "ab-0-0"), (other, "a"), (other, "b")]:
        peer.send(wire.Submit(request(name, count=50)))
    bench.pump_until(lambda: bench.host.num_running == 5)
    operator.send(wire.AbortRequests(7, "a"))
    assert operator.received(wire.CountReply) == [wire.CountReply(7, 3)]
    ended = [output for peer, count in ((one, 2), (other, 1)) for output in batched(peer.received(wire.Outputs, count))]
    assert {output.request_id for output in ended} == {"a-0-0", "a-0-1", "a"}
    assert {(output.finish_reason, output.error_code) for output in ended} == {("abort", "aborted_by_operator")}
    assert bench.core.load().running == 2
    operator.send(wire.AbortRequests(8, "a"))
    assert operator.received(wire.CountReply) == [wire.CountReply(8, 0)]


def batched(messages: list[wire.Outputs]) -> list[TokenOutput]:
    return [output for message in messages for output in message.batch]


def test_the_prefix_cache_is_reset_once_for_each_time_that_it_is_asked_for(bench: Bench) -> None:
    peer = bench.peer()
    peer.send(wire.ResetPrefixCache(1))
    assert isinstance(from_wire(peer.received(wire.ErrorReply)[0].error), LoadingError)
    bench.serve()
    peer.send(wire.ResetPrefixCache(2))
    assert peer.received(wire.DoneReply) == [wire.DoneReply(2)]
    assert bench.core.resets == 1


def test_an_output_that_fits_no_frame_fails_its_request_alone(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.serve()
    peer = bench.welcomed()
    monkeypatch.setattr(wire, "MAX_ENGINE_FRAME_BYTES", 200)
    peer.send(wire.Submit(request("r" * 300, count=5)))
    peer.send(wire.Submit(request("ok", count=2)))
    bench.pump_until(lambda: bench.host.num_running == 2)
    monkeypatch.setattr(wire, "MAX_ENGINE_FRAME_BYTES", 420)
    bench.core.step()  # its outputs are not sent: the next ones are of the second token
    big = TokenOutput("r" * 300 + "#1", 0, 1, list(range(1000)))
    bench.host.send_outputs([big, *[o for o in bench.core.step() if o.request_id.startswith("ok")]])
    messages = peer.received(wire.Outputs, 2)
    (failed,) = outputs_of(messages, "r" * 300)
    assert (failed.finish_reason, failed.error_code) == ("error", "output_too_large")
    assert outputs_of(messages, "ok")[-1].finish_reason == "length"
    assert bench.host.num_running == 0
