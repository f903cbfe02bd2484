"""What a registry holds may be anything: what cannot be used is left out, said once, and never more than that."""

from __future__ import annotations

import logging
import random

import msgspec
import pytest

from router.registry.base import GatewayRecord, RankAddress, WorkerRecord
from router.registry.records import (
    MAX_RANKS,
    MAX_RECORD_BYTES,
    MAX_RECORDS,
    RecordError,
    Sieve,
    check_record,
    convert_record,
    decode_record,
    encode_record,
)
from tests.support.registries import gateway, ids, worker


def test_records_survive_the_way_through_text() -> None:
    record = worker(
        role="prefill",
        ranks=(
            RankAddress(dp_rank=0, wire="tcp://[fd00::1]:5570", events="tcp://h:1", events_replay="tcp://h:2"),
            RankAddress(dp_rank=1, wire="ipc:///run/headrace/1"),
        ),
        public_key="rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7",
        http_url="http://10.0.0.1:8080",
        numerics="cpu/torch/float32/invariant",
        pid=7,
    )
    assert decode_record(encode_record(record), WorkerRecord) == record
    assert convert_record(msgspec.to_builtins(record), WorkerRecord) == record
    assert decode_record(encode_record(gateway()), GatewayRecord) == gateway()


RANK = RankAddress(dp_rank=0, wire="tcp://h:1")


@pytest.mark.parametrize(
    "fields",
    [
        {"worker_id": ""},
        {"worker_id": "a/b"},
        {"worker_id": "x" * 129},
        {"worker_id": "a\n"},
        {"incarnation": "\x1b[31m"},
        {"model": ""},
        {"model": "m" * 513},
        {"model": "a\x00b"},
        {"numerics": "\n"},
        {"compatibility": "not hex!"},
        {"compatibility": "A" * 64},
        {"http_url": "file:///etc/passwd"},
        {"http_url": "http://"},
        {"http_url": "http://[::1"},
        {"http_url": "http://h:99999"},
        {"http_url": "http://h/a b"},
        {"public_key": "short"},
        {"public_key": "#" * 40},
        {"public_key": "\u00e9" * 40},
        {"pid": -1},
        {"ranks": (RankAddress(dp_rank=0, wire="inproc://x"),)},
        {"ranks": (RankAddress(dp_rank=0, wire="tcp://h"),)},
        {"ranks": (RankAddress(dp_rank=0, wire="tcp://h:1", events="pgm://x:1"),)},
        {"ranks": (RankAddress(dp_rank=-1, wire="tcp://h:1"),)},
        {"ranks": (RANK, RANK)},
        {"ranks": tuple(RankAddress(dp_rank=i, wire="tcp://h:1") for i in range(MAX_RANKS + 1))},
    ],
)
def test_values_that_nobody_may_act_on_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(RecordError):
        check_record(worker(**fields))


@pytest.mark.parametrize(
    "address",
    [
        "",
        "tcp://",
        "http://h:1",
        "tcp://h:123456",
        "tcp://h:65536",
        "tcp://h:0",
        "tcp://*:1",
        "tcp://source;h:1",
        "tcp://[::1:1",
        "tcp://h\x00:1",
        "ipc://" + "x" * 104,
        "ipc://" + "\u00e9" * 52,
        "ipc://a\x00b",
        "ipc://\ud800",
    ],
    ids=ascii,
)
def test_gateways_need_an_address(address: str) -> None:
    with pytest.raises(RecordError):
        check_record(gateway(dispatches=address))


@pytest.mark.parametrize(
    "fields",
    [
        {"dialect": "openai", "ranks": ()},
        {"dialect": "openai", "http_url": "http://h:1"},
        {"dialect": "openai", "http_url": "http://h:1", "ranks": (), "events": "http://h:2"},
        {"dialect": "openai", "http_url": "http://h:1", "ranks": (), "events_topic": "x" * 1000},
    ],
    ids=["no url", "ranks", "events", "topic"],
)
def test_workers_of_other_makes_have_a_url_and_no_ranks(fields: dict[str, object]) -> None:
    with pytest.raises(RecordError):
        check_record(worker(**fields))
    check_record(worker(dialect="openai", http_url="http://h:1", ranks=(), events="tcp://h:5557"))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"worker_id": 1}',
        encode_record(worker())[:-1],
        b'{"worker_id":"a","incarnation":"1","model":"m","state":"gone"}',
        b" " * (MAX_RECORD_BYTES + 1),
        encode_record(gateway()),
    ],
)
def test_what_is_no_record_is_refused(data: bytes) -> None:
    with pytest.raises(RecordError):
        decode_record(data, WorkerRecord)


def test_any_damage_is_a_refusal_or_another_valid_record() -> None:
    rng = random.Random(3)
    good = encode_record(worker())
    for _ in range(3000):
        data = bytearray(good)
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        try:
            check_record(decode_record(bytes(data), WorkerRecord))
        except RecordError:
            continue


def test_a_list_is_ordered_bounded_and_without_duplicates(caplog: pytest.LogCaptureFixture) -> None:
    sieve = Sieve()
    many = [(f"w{i:05}", encode_record(worker(f"w{i:05}"))) for i in reversed(range(MAX_RECORDS))]
    listed = sieve.listed([*many, ("w", encode_record(worker("w")))], WorkerRecord)
    assert ids(listed) == [f"w{i:05}" for i in range(MAX_RECORDS)]
    assert ids(sieve.unique([("a", worker("x", pid=1)), ("b", worker("x", pid=2))])) == ["x"]
    assert "another's already" in caplog.text


def test_a_record_under_another_name_is_left_out_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    sieve = Sieve()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert sieve.listed([("evil\n\x1b", encode_record(worker("good")))], WorkerRecord) == ()
    (message,) = caplog.messages
    assert "another's id" in message
    assert "\n" not in message
    assert "\x1b" not in message
