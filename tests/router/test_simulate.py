"""The simulator: its workers against sums by hand, and what a whole run must show."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest

from engine.errors import ConfigError
from engine.protocol import EngineLoad
from router.admission import AdmissionLimits
from router.policies.registry import POLICY_NAMES
from router.simulate.block_cache import BlockCache
from router.simulate.gateway import Delays
from router.simulate.report import Summary
from router.simulate.run import Cluster, simulate
from router.simulate.table import table
from router.simulate.virtual_time import VirtualTime
from router.simulate.worker import Job, SimWorker, WorkerModel
from router.simulate.workload import Conversations, SimRequest, read_trace

MODEL = WorkerModel(
    prefill_rate=1000.0, weights_s=0.1, attention_rate=0, chunk_tokens=500, cache_blocks=100, block_tokens=100
)


def request(name: str, tokens: int, output: int = 1, arrival_s: float = 0.0, head: str | None = None) -> SimRequest:
    """Prompts of the same `head` begin alike, in all full blocks that both have."""
    keys = tuple(f"{head or name}{number}".encode().ljust(32) for number in range(tokens // 100))
    return SimRequest(request_id=name, arrival_s=arrival_s, prompt_tokens=tokens, output_tokens=output, keys=keys)


class Bench:
    """One worker, and when its requests got their first and their last token."""

    def __init__(self, model: WorkerModel = MODEL) -> None:
        self.time = VirtualTime()
        self.loads: list[EngineLoad] = []
        self.stored: list[bytes] = []
        self.removed: list[bytes] = []
        self.first: dict[str, float] = {}
        self.end: dict[str, float] = {}
        self.cached: dict[str, int] = {}
        self.worker = SimWorker("w", self.time, model, self.note_step)

    def note_step(self, worker: SimWorker, load: EngineLoad, stored: list[bytes], removed: list[bytes]) -> None:
        self.loads.append(load)
        self.stored += stored
        self.removed += removed

    def submit(self, asked: SimRequest, *, is_received: bool = False) -> None:
        name = asked.request_id

        def first(cached: int) -> None:
            self.first[name], self.cached[name] = self.time.now, cached

        def end() -> None:
            self.end[name] = self.time.now

        job = Job(asked, outputs=asked.output_tokens, on_first=first, on_end=end, is_received=is_received)
        self.time.at(asked.arrival_s, lambda: self.worker.submit(job))


def test_prompts_are_computed_in_chunks_first_come_first_served_beside_decodes() -> None:
    bench = Bench()
    bench.submit(request("a", 700, output=3))
    bench.submit(request("b", 300))
    bench.time.run()
    # Steps of 500, 200 + 300 and two of one token: 0.5, 0.5, 0.1, 0.1 s.
    assert bench.first == pytest.approx({"a": 1.0, "b": 1.0})
    assert bench.end == pytest.approx({"a": 1.2, "b": 1.0})
    assert [load.queued_uncached_tokens for load in bench.loads] == [500, 0, 0, 0]
    last = bench.loads[-1]
    assert (last.prefill_tokens_total, last.prefill_busy_s_total) == (1000, pytest.approx(1.0))
    assert (last.decode_tokens_total, last.decode_busy_s_total) == (2, pytest.approx(0.2))
    assert (last.running, last.kv_blocks_used, last.running_context_tokens) == (0, 0, 0)
    bench.worker.close_books()
    assert bench.worker.in_flight_s == pytest.approx(2.2)


def test_context_makes_steps_longer() -> None:
    bench = Bench(msgspec.structs.replace(MODEL, attention_rate=1000.0))
    bench.submit(request("a", 100, output=3))
    bench.time.run()
    assert bench.end["a"] == pytest.approx(0.1 + (0.1 + 0.101) + (0.1 + 0.102))


def test_what_was_computed_is_cached_and_its_last_token_is_computed_again() -> None:
    bench = Bench()
    bench.submit(request("a", 400, head="x"))
    bench.submit(request("b", 400, head="x", arrival_s=10))
    bench.submit(request("c", 650, head="x", arrival_s=20))
    bench.time.run()
    assert bench.cached == {"a": 0, "b": 399, "c": 400}
    assert bench.first["c"] == pytest.approx(20.25)
    assert len(bench.stored) == 6
    assert bench.removed == []


def test_the_least_recently_used_make_room_and_what_runs_stays() -> None:
    bench = Bench(msgspec.structs.replace(MODEL, cache_blocks=10))
    bench.submit(request("a", 400))
    bench.submit(request("b", 400, arrival_s=1))
    bench.submit(request("a2", 400, head="a", arrival_s=2))
    bench.submit(request("c", 500, output=50, arrival_s=3))
    bench.submit(request("a3", 400, head="a", arrival_s=4))
    bench.submit(request("too much for now", 500, arrival_s=5))
    bench.time.run()
    assert bench.cached["a3"] > 0, "b was older"
    assert {key[:1] for key in bench.removed} >= {b"b"}
    assert bench.first["too much for now"] > bench.end["c"] > 7
    assert max(load.kv_blocks_used for load in bench.loads) <= 10


def test_a_received_prompt_is_not_computed() -> None:
    bench = Bench()
    bench.submit(request("a", 5000, output=2), is_received=True)
    bench.time.run()
    assert bench.first["a"] == pytest.approx(0.1)
    assert bench.worker.prefill_tokens == 1


def test_the_cache_adds_up_under_any_load() -> None:
    rng, cache = random.Random(0), BlockCache(60)
    held: list[tuple[list[bytes], int]] = []
    there: set[bytes] = set()
    for _ in range(2000):
        head = rng.randrange(8)
        keys = [bytes([head, number]) for number in range(rng.randrange(1, 20))]
        cached = keys[: cache.match(keys)]
        if rng.random() < 0.5 and cache.reserve(cached, len(keys)):
            private = len(keys) - len(cached)
            for key in keys[len(cached) :]:
                if cache.publish(key):
                    private -= 1
                    cached = [*cached, key]
            held.append((cached, private))
        elif held:
            cache.release(*held.pop(rng.randrange(len(held))))
        stored, removed = cache.take_events()
        assert not set(stored) & there - set(removed)
        there = (there - set(removed)) | set(stored)
        assert cache.used <= 60
    for entry in held:
        cache.release(*entry)
    assert cache.used == 0
    assert all(cache.match([key]) for key in there)


SMALL = WorkerModel(cache_blocks=400, attention_rate=0)
LOAD = Conversations(rate=60.0, requests=200, groups=6, think_s=1.0, output_tokens=32)


def run(**fields: object) -> Summary:
    return simulate(msgspec.structs.replace(Cluster(workers=4, worker=SMALL), **fields), LOAD.draw(1))


def test_the_same_seed_gives_the_same_figures_and_another_one_others() -> None:
    first = run(gateways=3)
    assert run(gateways=3) == first
    assert run(gateways=3, seed=1) != first


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_every_policy_answers_every_request(policy: str) -> None:
    summary = run(policy=policy, gateways=2)
    assert (summary.requests, summary.shed, len(summary.ttft_s)) == (200, 0, 200)


def test_the_default_policy_finds_more_in_caches_than_one_that_does_not_look() -> None:
    assert run().hit_rate > run(policy="round_robin").hit_rate + 0.1


def test_a_block_that_all_prompts_share_does_not_draw_them_all_to_one_worker() -> None:
    """Each request has the same first block and no other in common."""
    rng = random.Random(4)
    requests, now_s = [], 0.0
    for number in range(240):
        now_s += rng.expovariate(12.0)
        tokens = rng.randrange(2000, 8000)
        keys = (bytes(32), *(f"{number}/{block}".encode().ljust(32) for block in range(1, tokens // 512)))
        requests.append(
            SimRequest(request_id=str(number), arrival_s=now_s, prompt_tokens=tokens, output_tokens=8, keys=keys)
        )
    summary = simulate(Cluster(workers=4), requests)
    assert summary.token_imbalance < 1.3
    assert summary.request_imbalance < 1.3


def test_gateways_that_tell_each_other_do_better_than_those_that_do_not() -> None:
    told = run(gateways=4)
    alone = run(gateways=4, delays=Delays(sharing_s=None, report_s=5.0))
    assert told.ttft_p90_s < alone.ttft_p90_s


def test_prompts_computed_apart_decode_elsewhere() -> None:
    summary = run(decode_workers=4)
    assert (summary.shed, len(summary.ttft_s)) == (0, 200)
    assert summary.hit_rate > 0.3


def test_what_a_full_queue_sheds_is_counted() -> None:
    limits = AdmissionLimits(budget_s=0.1, max_queued=5, max_wait_s=1.0)
    summary = run(admission=limits, worker=msgspec.structs.replace(SMALL, prefill_rate=2000.0))
    assert 0 < summary.shed < 200
    assert len(summary.ttft_s) + summary.shed == 200
    assert "shed" in table("load", [summary])


def test_a_trace_is_read_at_its_speed(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 2000, "input_length": 1100, "output_length": 7, "hash_ids": [0, 5, 6]},
        {"timestamp": 0, "input_length": 600, "output_length": 0, "hash_ids": [0, 1]},
    ]
    path.write_bytes(b"\n".join(msgspec.json.encode(row) for row in rows))
    first, second = read_trace(path, speed=4.0)
    assert (first.arrival_s, first.prompt_tokens, first.output_tokens, len(first.keys)) == (0.0, 600, 1, 1)
    assert (second.arrival_s, second.prompt_tokens, second.output_tokens, len(second.keys)) == (0.5, 1100, 7, 2)
    assert first.keys[0] == second.keys[0]
    assert len(read_trace(path, limit=1)) == 1
    assert [one.arrival_s for one in read_trace(path, spread_seed=1)] != [0.0, 2.0]
    path.write_text("not json")
    with pytest.raises(ConfigError):
        read_trace(path)


def test_requests_that_were_recorded_in_bursts_are_spread_over_the_time_between_them(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 3000 * (number // 20), "input_length": number, "output_length": 1, "hash_ids": [0]}
        for number in range(60)
    ]
    path.write_bytes(b"\n".join(msgspec.json.encode(row) for row in rows))
    spread = read_trace(path, speed=3.0, spread_seed=1)
    assert spread == read_trace(path, speed=3.0, spread_seed=1)
    times = [one.arrival_s for one in spread]
    assert times == sorted(times)
    assert [int(time) for time in times] == [number // 20 for number in range(60)]
    assert len(set(times)) == 60
    assert [one.prompt_tokens for one in spread][1:] == list(range(1, 60))
