"""Requests whose KV a port loads, reads and holds: who owns the blocks, and what is computed again."""

from __future__ import annotations

import pytest

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.errors import ConfigError
from engine.protocol import CachedTokens
from tests.support.core_world import FULL, World, make_request, sliding
from tests.support.fake_kv_port import FakeKVPort
from tests.support.fake_runner import FakeRunner


def warmed_port_world(**settings: object) -> World:
    """A world whose port has the blocks of range(1, 25) and whose device has forgotten them."""
    world = World(with_port=True, block_size=4, **settings)  # type: ignore[arg-type]
    assert world.port is not None
    world.port.hold = 1.0
    world.submit(make_request("warm", prompt=range(1, 25), max_tokens=1))
    world.run()
    world.core.reset_prefix_cache()
    world.port.rng.random = lambda: 0.99  # type: ignore[method-assign]  # from here on it matches and does not fail
    return world


def test_loaded_blocks_count_as_cached_in_their_tier() -> None:
    world = warmed_port_world()
    attempt = world.submit(make_request(prompt=range(1, 27), max_tokens=2, ignore_eos=True))
    world.step()
    world.run()
    assert attempt.outputs[0].cached == CachedTokens(ram=24)


def test_others_go_on_while_a_request_waits_for_its_kv() -> None:
    world = warmed_port_world(port_late=0)
    assert world.port is not None
    other = world.submit(make_request("other", prompt=[40], max_tokens=30, ignore_eos=True))
    world.step()
    attempt = world.submit(make_request(prompt=range(1, 27), max_tokens=2, ignore_eos=True))
    world.step()
    world.port.loads["r"].polls_left = 5
    said = len(other.emitted)
    for _ in range(4):
        world.step()
        assert world.core.load().waiting_kv == 1
    assert len(other.emitted) == said + 4
    assert not attempt.emitted
    world.run()


def test_a_core_that_only_waits_for_kv_says_so() -> None:
    world = warmed_port_world(port_late=0)
    assert world.port is not None
    world.submit(make_request(prompt=range(1, 27), max_tokens=2, ignore_eos=True))
    world.step()
    world.port.loads["r"].polls_left = 2
    world.step()
    assert world.core.has_work
    assert not world.core.made_progress
    world.run()


@pytest.mark.parametrize("good", range(7))
@pytest.mark.parametrize("specs", [[FULL], [FULL, sliding(6)]], ids=["full", "sliding"])
def test_what_a_failed_load_left_out_is_computed(good: int, specs: list[object]) -> None:
    world = warmed_port_world(specs=specs, num_blocks=[65] * len(specs), port_late=2)
    assert world.port is not None
    attempt = world.submit(make_request(prompt=range(1, 27), max_tokens=2, ignore_eos=True))
    world.step()
    world.port.loads["r"].good_blocks = good
    world.run()
    cached = attempt.outputs[0].cached
    assert cached is not None
    assert cached.ram in ((good * 4,) if len(specs) == 1 else (good * 4, 0))


def test_a_load_leaves_no_block_behind_the_window() -> None:
    world = warmed_port_world(specs=[sliding(6)], num_blocks=[65], port_late=0)
    first = world.submit(make_request("first", prompt=range(1, 13), max_tokens=1))  # the device has a part again
    world.run()
    assert first.finish_reason is not None
    world.submit(make_request(prompt=range(1, 27), max_tokens=20, ignore_eos=True))
    for _ in range(6):
        world.step()
    assert world.core.load().running == 1
    assert world.core.kv.blocks_used <= 3  # 6 tokens touch at most 3 blocks
    world.run()


def test_a_load_of_the_whole_prompt_computes_its_last_token_again() -> None:
    world = warmed_port_world()
    attempt = world.submit(make_request(prompt=range(1, 25), max_tokens=2, ignore_eos=True))
    world.run()
    assert attempt.outputs[0].cached == CachedTokens(ram=23)


def test_blocks_under_load_stay_with_the_port_when_the_request_is_aborted() -> None:
    world = warmed_port_world(port_late=0)
    assert world.port is not None
    attempt = world.submit(make_request(prompt=range(1, 27), max_tokens=2))
    world.step()
    world.port.loads["r"].polls_left = 3
    world.core.abort("r")
    world.step()
    assert attempt.finish_reason == "abort"
    assert world.core.kv.blocks_used == 6
    world.run()


def test_held_blocks_come_back_when_the_port_is_done() -> None:
    world = World(with_port=True, port_hold=1.0, port_late=0, block_size=4)
    assert world.port is not None
    world.submit(make_request(prompt=range(1, 13), max_tokens=1))
    world.step()
    world.port.holds["r"] = 3
    assert world.core.kv.blocks_used == 3
    assert world.core.has_work
    world.run()


def test_a_later_attempt_runs_without_the_port_while_an_earlier_one_is_loading() -> None:
    world = warmed_port_world(port_late=0)
    assert world.port is not None
    first = world.submit(make_request(prompt=range(1, 27), max_tokens=2, ignore_eos=True))
    world.step()
    world.port.loads["r"].polls_left = 20
    second = world.submit(make_request(prompt=range(1, 27), max_tokens=2, ignore_eos=True, attempt=1))
    for _ in range(4):
        world.step()
    assert (first.finish_reason, second.finish_reason) == ("abort", "length")
    assert second.outputs[0].cached == CachedTokens()
    world.run()


def test_a_port_needs_the_prefix_cache() -> None:
    world = World()
    runner = FakeRunner([FULL], 4)
    with pytest.raises(ConfigError, match="prefix cache"):
        EngineCore(world.info, EngineConfig(prefix_cache=False), runner, [9], FakeKVPort(runner.memory))
