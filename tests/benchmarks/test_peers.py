"""The comparison with other servers: the model that they get is ours, and figures follow from rounds as they say."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec
import pytest
import torch

from benchmarks.hf_directory import write_hf_directory
from benchmarks.peer_figures import CachedPrompt, Result, Settings, Turn, lines
from benchmarks.peers import earlier_result
from engine.errors import ModelError
from engine.loader.load import open_checkpoint
from tests.support.decoders import write_decoder
from tests.support.gguf_files import write_gguf

SETTINGS = Settings(
    model="model",
    prompt_tokens=130,
    output_tokens=64,
    cached_prompt_tokens=2000,
    requests={"4": 8},
    servers={"headrace": ("1", "headrace serve"), "llama-server": ("2", "llama-server")},
    machine={"cores": 2},
)


def turn(number: int, server: str, tokens_per_s: float) -> Turn:
    return Turn(
        round=number,
        server=server,
        concurrency=4,
        requests=8,
        failed=0,
        prompt_tokens=1040,
        output_tokens=512,
        elapsed_s=512 / tokens_per_s,
        output_tokens_per_s=tokens_per_s,
        ttft_p50_ms=100.0,
        itl_p50_ms=10.0,
        e2e_p50_ms=700.0,
        load_average=1.0,
        idle_cpu_s=0.0,
    )


def result_of(*turns: Turn, cached: tuple[CachedPrompt, ...] = ()) -> Result:
    return Result(settings=SETTINGS, started_at=["now"], turns=list(turns), cached_prompts=list(cached)).with_figures()


@pytest.mark.parametrize("name", ["llama, linear rope", "mistral, windows", "qwen2, windows behind full", "qwen3"])
def test_a_written_directory_is_the_same_model(tmp_path: Path, name: str) -> None:
    source, written = write_decoder(tmp_path / "source", name), tmp_path / "written"
    if "rope" in name:
        with pytest.raises(ModelError, match="rope scaling"):
            write_hf_directory(str(source), written)
        return
    write_hf_directory(str(source), written, torch.float32)
    assert_same_model(source, written)


def test_a_gguf_file_becomes_a_directory(tmp_path: Path) -> None:
    gguf, written = tmp_path / "model.gguf", tmp_path / "written"
    write_gguf(write_decoder(tmp_path / "source", "qwen2"), gguf, "qwen2")
    write_hf_directory(str(gguf), written, torch.float32)
    assert_same_model(gguf, written)


def assert_same_model(source: Path, written: Path) -> None:
    before, after = open_checkpoint(str(source)), open_checkpoint(str(written))
    assert (after.architecture, after.config) == (before.architecture, before.config)
    assert (after.text.tokenizer, after.text.chat_template) == (before.text.tokenizer, before.text.chat_template)
    assert (after.text.bos_id, after.text.special_tokens) == (before.text.bos_id, before.text.special_tokens)
    assert set(after.tensor_names) == set(before.tensor_names)
    for name in before.tensor_names:
        assert torch.equal(after.read(name, hashlib.sha256()), before.read(name, hashlib.sha256())), name
    before.close()
    after.close()


def test_a_ratio_is_the_median_of_the_rounds_ratios() -> None:
    """A machine that is twice as slow in one round changes no ratio."""
    rates = ((100.0, 50.0), (60.0, 25.0), (90.0, 60.0))
    turns = [
        turn(number, server, rate)
        for number, pair in enumerate(rates)
        for server, rate in zip(("headrace", "llama-server"), pair, strict=True)
    ]
    result = result_of(*turns)
    assert result.ratios == {"headrace / llama-server @ 4": 2.0}
    assert result.medians["headrace @ 4"]["tokens_per_s"] == 90.0
    assert (result.medians["headrace @ 4"]["low"], result.medians["headrace @ 4"]["high"]) == (60.0, 100.0)


@pytest.mark.parametrize(("rate", "verdict"), [(50.0, "reached"), (49.0, "MISSED")])
def test_a_bar_is_told(rate: float, verdict: str) -> None:
    told = "\n".join(lines(result_of(turn(0, "headrace", rate), turn(0, "llama-server", 50.0))))
    assert f"at least 1.0 {verdict}" in told


def test_a_server_alone_has_no_ratio_but_its_cached_prompt() -> None:
    cached = CachedPrompt(round=0, prompt_tokens=2000, cached_tokens=1984, cold_ttft_ms=2000.0, cached_ttft_ms=60.0)
    result = result_of(turn(0, "headrace", 50.0), cached=(cached,))
    assert result.ratios == {"cached / cold TTFT": pytest.approx(0.03)}


def test_rounds_are_added_to_those_of_the_same_settings_only(tmp_path: Path) -> None:
    path = tmp_path / "peers.json"
    assert earlier_result(path, SETTINGS).turns == []
    path.write_bytes(msgspec.json.encode(result_of(turn(0, "headrace", 50.0))))
    assert [one.round for one in earlier_result(path, SETTINGS).turns] == [0]
    with pytest.raises(ValueError, match="other settings"):
        earlier_result(path, msgspec.structs.replace(SETTINGS, output_tokens=65))
