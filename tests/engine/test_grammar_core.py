"""Constrained requests through the engine's core with a real runner: their output is the grammar's whatever happens on
the way, and the tokens are those of a request that runs alone."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import jsonschema
import pytest

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.errors import RequestError, UnsupportedError
from engine.grammar import registry
from engine.grammar.base import Backend, CompiledGrammar, GrammarError, Matcher, Vocabulary
from engine.grammar.pool import GrammarPool
from engine.protocol import GenerateRequest, Grammar, SamplingParams, TokenOutput
from engine.runner.build import build_engine
from engine.text.tokenizer import TextCodec
from tests.support.random_schemas import random_schema
from tests.support.tiny_models import VOCAB_SIZE, write_tiny_llama

BLOCK_SIZE = 16
BLOCK_BYTES = 2 * 2 * 2 * 16 * BLOCK_SIZE * 4  # keys and values, layers, heads, head_dim, float32
MAX_MODEL_LEN = 192
EOS_IDS = (2, 3)
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "pattern": "^[a-z]{2,12}$"},
            "size": {"type": "integer", "minimum": 0, "maximum": 9999},
            "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 1, "maxItems": 3},
        },
        "required": ["name", "size", "tags"],
        "additionalProperties": False,
    }
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"), max_positions=MAX_MODEL_LEN)


class World:
    def __init__(self, core: EngineCore, codec: TextCodec) -> None:
        self.core = core
        self.codec = codec

    def run(self, requests: Sequence[GenerateRequest]) -> dict[str, list[TokenOutput]]:
        """Submit all and step to the end; return the outputs of each."""
        outputs: dict[str, list[TokenOutput]] = {request.request_id: [] for request in requests}
        for request in requests:
            self.core.submit(request)
        while self.core.has_work:
            for output in self.core.step():
                outputs[output.request_id].append(output)
            self.core.check_integrity()
        assert all(taken[-1].finish_reason for taken in outputs.values())
        return outputs

    def text(self, outputs: Sequence[TokenOutput]) -> str:
        return self.codec.decode(tokens_of(outputs))


def tokens_of(outputs: Sequence[TokenOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


@contextmanager
def running(model: Path, *, blocks: int = 400, pool: GrammarPool | None = None, **settings: object) -> Iterator[World]:
    fields = {"max_running": 8, "max_step_tokens": 256, "threads": 1, "block_size": BLOCK_SIZE, **settings}
    config = EngineConfig(
        model=str(model),
        dtype="float32",
        numerics="invariant",
        device="cpu",
        max_model_len=MAX_MODEL_LEN,
        kv_cache_memory_bytes=blocks * BLOCK_BYTES,
        **fields,  # type: ignore[arg-type]
    )
    info, runner, num_blocks, assets = build_engine(config, lambda fraction, phase: None)
    codec = TextCodec.from_assets(info.text, assets, vocab_size=info.vocab_size)
    grammars = pool or GrammarPool.of(codec, info.vocab_size, info.eos_ids)
    try:
        core = EngineCore(info, config, runner, num_blocks, grammars=grammars)
        yield World(core, codec)
    finally:
        grammars.close()
        runner.close()


def request(
    request_id: str, grammar: Grammar | None, *, seed: int = 1, resume_ids: Sequence[int] = (), **sampling: object
) -> GenerateRequest:
    rng = random.Random(seed)
    fields = {"temperature": 1.0, "max_tokens": 120, "seed": seed, **sampling}
    return GenerateRequest(
        request_id=request_id,
        prompt_ids=rng.choices(range(40, 100), k=rng.randint(5, 30)),
        resume_ids=list(resume_ids),
        sampling=SamplingParams(**fields),  # type: ignore[arg-type]
        grammar=grammar,
    )


@pytest.fixture(scope="module")
def world(model: Path) -> Iterator[World]:
    with running(model) as one:
        yield one


def test_outputs_are_the_grammars_and_unconstrained_neighbours_do_not_notice(world: World) -> None:
    free = [request(f"free{i}", None, seed=i, max_tokens=30, ignore_eos=True) for i in range(3)]
    alone = {name: tokens_of(outputs) for one in free for name, outputs in world.run([one]).items()}
    bound = [request(f"bound{i}", Grammar("json_schema", SCHEMA), seed=i) for i in range(5)]
    outputs = world.run([*free, *bound])
    for one in bound:
        assert outputs[one.request_id][-1].finish_reason == "stop"
        jsonschema.validate(json.loads(world.text(outputs[one.request_id])), json.loads(SCHEMA))
    assert {one.request_id: tokens_of(outputs[one.request_id]) for one in free} == alone
    assert len({world.text(outputs[one.request_id]) for one in bound}) > 1


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.0},
        {"temperature": 1.0, "top_k": 5},
        {"temperature": 1.0, "top_p": 0.5, "min_p": 0.01, "logprobs": 2},
        {"temperature": 0.7, "presence_penalty": 1.0, "repetition_penalty": 1.3, "logit_bias": {50: 5.0}},
    ],
    ids=lambda sampling: "-".join(sampling),
)
def test_every_way_to_choose_obeys_the_grammar(world: World, sampling: dict[str, object]) -> None:
    choices = ["red", "green", "blue and green"]
    outputs = world.run(
        [request(f"r{i}", Grammar("choice", json.dumps(choices)), seed=i, **sampling) for i in range(4)]
    )
    for taken in outputs.values():
        assert world.text(taken) in choices
        assert taken[-1].finish_reason == "stop"
        assert taken[-1].stop_token is None  # the last token is the grammar's, and is shown


def test_preempted_overlapped_and_resumed_requests_choose_the_tokens_of_a_lone_one(model: Path, world: World) -> None:
    requests = [request(f"r{i}", Grammar("json_schema", SCHEMA), seed=i) for i in range(8)]
    alone = {one.request_id: tokens_of(world.run([one])[one.request_id]) for one in requests}
    assert world.core.load().preemptions_total == 0
    for in_flight in (1, 2):
        with running(model, blocks=14, in_flight_steps=in_flight, prefix_cache=False) as cramped:
            together = cramped.run(requests)
            assert cramped.core.load().preemptions_total > 0
        assert {name: tokens_of(outputs) for name, outputs in together.items()} == alone
    for one in requests:
        tokens = alone[one.request_id]
        for cut in (1, len(tokens) // 2, len(tokens) - 1):
            resumed = request(
                f"{one.request_id}-{cut}", one.grammar, seed=one.sampling.seed or 0, resume_ids=tokens[:cut]
            )
            outputs = world.run([resumed])[resumed.request_id]
            assert tokens[:cut] + tokens_of(outputs) == tokens
            assert outputs[0].offset == cut


def test_the_end_token_ends_a_grammar_where_it_accepts_and_only_there(world: World) -> None:
    grammar = Grammar("regex", "[ab]{3,}")
    end = dict.fromkeys(EOS_IDS, 100.0)
    (outputs,) = world.run([request("r", grammar, logit_bias=end)]).values()
    assert outputs[-1].finish_reason == "stop"
    assert outputs[-1].stop_token in EOS_IDS
    assert len(world.text(outputs)) == 3
    (outputs,) = world.run([request("r", grammar, logit_bias=end, min_tokens=7)]).values()
    assert len(world.text(outputs)) == 7


def test_a_length_limit_cuts_a_grammar_and_its_last_token_wins_over_the_limit(world: World) -> None:
    (cut,) = world.run([request("r", Grammar("regex", "[ab]{9}"), max_tokens=4)]).values()
    assert cut[-1].finish_reason == "length"
    (whole,) = world.run([request("r", Grammar("regex", "[ab]{4}"), max_tokens=4)]).values()
    assert whole[-1].finish_reason == "stop"
    assert len(tokens_of(whole)) == 4


@pytest.mark.parametrize(
    ("fields", "message", "code"),
    [
        ({"grammar": Grammar("regex", "(")}, "unclosed", "invalid_value"),
        ({"grammar": Grammar("json_schema", '{"type": "x"}')}, "Invalid type", "invalid_value"),
        ({"grammar": Grammar("regex", "ab"), "resume_ids": [100]}, "does not match", "request_failed"),
        ({"grammar": Grammar("regex", "[0-9]+"), "allowed_token_ids": (90,)}, "no token to choose", "invalid_value"),
        ({"grammar": Grammar("grammar", 'start: ""'), "min_tokens": 2}, "no token to choose", "invalid_value"),
    ],
)
def test_a_bad_grammar_ends_its_own_request_and_no_other(
    world: World, fields: dict[str, object], message: str, code: str
) -> None:
    outputs = world.run([request("bad", **fields), request("good", Grammar("choice", '["yes"]'))])  # type: ignore[arg-type]
    assert outputs["bad"][-1].finish_reason == "error"
    assert message in (outputs["bad"][-1].error or "")
    assert outputs["bad"][-1].error_code == code
    assert world.text(outputs["good"]) == "yes"


class _FailingMatcher:
    def __init__(self, when: int) -> None:
        self._left = when
        self.error: str | None = None

    def advance(self, token_id: int) -> bool:
        self._left -= 1
        if self._left == 0:
            self.error = "out of fuel"
            raise GrammarError(self.error)
        return False

    def mask(self) -> bytes:
        return b"\xff" * (-(-VOCAB_SIZE // 32) * 4)


class _FailingBackend:
    def compile(self, grammar: Grammar) -> CompiledGrammar:
        return _FailingGrammar(int(grammar.source))


class _FailingGrammar:
    def __init__(self, when: int) -> None:
        self._when = when

    def start(self, output_ids: Sequence[int]) -> Matcher:
        return _FailingMatcher(self._when)


def _open_failing(vocabulary: Vocabulary) -> Backend:
    return _FailingBackend()


def _no_vocabulary() -> Vocabulary:
    return Vocabulary((), (), (), lambda text: [])


def test_a_matcher_that_fails_on_the_way_ends_its_request_alone(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.BACKENDS, "failing", _open_failing)
    pool = GrammarPool(_no_vocabulary, backend="failing")
    with running(model, pool=pool, in_flight_steps=2) as world:
        bad = request("bad", Grammar("regex", "3"), ignore_eos=True)
        outputs = world.run([bad, request("good", None, max_tokens=20, ignore_eos=True)])
    assert outputs["bad"][-1].finish_reason == "error"
    assert "out of fuel" in (outputs["bad"][-1].error or "")
    assert len(tokens_of(outputs["bad"])) == 2
    assert len(tokens_of(outputs["good"])) == 20


def test_requests_run_on_while_one_waits_for_its_grammar_and_an_abort_ends_the_wait(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = threading.Event()

    class Slow(_FailingBackend):
        def compile(self, grammar: Grammar) -> CompiledGrammar:
            assert held.wait(20)
            return _FailingGrammar(10_000)

    monkeypatch.setitem(registry.BACKENDS, "slow", lambda vocabulary: Slow())
    pool = GrammarPool(_no_vocabulary, backend="slow")
    try:
        with running(model, pool=pool) as world:
            core = world.core
            for name in ("first", "second"):
                core.submit(request(name, Grammar("regex", name), max_tokens=3, ignore_eos=True))
            core.submit(request("free", None, max_tokens=5, ignore_eos=True))
            ended: dict[str, str] = {}
            while "free" not in ended:
                ended |= {output.request_id: output.finish_reason for output in core.step() if output.finish_reason}
                core.check_integrity()
            assert ended == {"free": "length"}
            assert core.load().waiting == 2
            core.step()
            assert not core.made_progress
            core.abort("first")
            held.set()
            while core.has_work:
                ended |= {output.request_id: output.finish_reason for output in core.step() if output.finish_reason}
            assert ended == {"free": "length", "first": "abort", "second": "length"}
    finally:
        held.set()


def test_a_grammar_that_takes_too_long_ends_its_request(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = threading.Event()

    class Stuck(_FailingBackend):
        def compile(self, grammar: Grammar) -> CompiledGrammar:
            held.wait(20)
            raise RequestError("late")

    monkeypatch.setitem(registry.BACKENDS, "stuck", lambda vocabulary: Stuck())
    monkeypatch.setattr("engine.core.TIME_LIMIT_S", 0.0)
    pool = GrammarPool(_no_vocabulary, backend="stuck")
    try:
        with running(model, pool=pool) as world:
            (outputs,) = world.run([request("r", Grammar("regex", "a"))]).values()
        assert outputs[-1].finish_reason == "error"
        assert "compiled within" in (outputs[-1].error or "")
    finally:
        held.set()


def test_an_engine_without_grammars_refuses_them_at_the_door(world: World, model: Path) -> None:
    config = EngineConfig(model=str(model), device="cpu", threads=1, kv_cache_memory_bytes=400 * BLOCK_BYTES)
    info, runner, num_blocks, _ = build_engine(config, lambda fraction, phase: None)
    try:
        with pytest.raises(UnsupportedError, match="constrain"):
            EngineCore(info, config, runner, num_blocks).submit(request("r", Grammar("regex", "a")))
    finally:
        runner.close()
    with pytest.raises(RequestError, match="at most"):
        world.core.submit(request("r", Grammar("regex", "a" * 200_000)))
    with pytest.raises(RequestError, match="surrogate"):
        world.core.submit(request("r", Grammar("regex", "\ud800")))


def test_outputs_for_generated_schemas_validate(world: World) -> None:
    rng = random.Random(20)
    schemas = [random_schema(rng) for _ in range(30)]
    requests = [
        request(f"s{i}", Grammar("json_schema", json.dumps(schema)), seed=i, max_tokens=160)
        for i, schema in enumerate(schemas)
    ]
    outputs = world.run(requests)
    finished = 0
    for one, schema in zip(requests, schemas, strict=True):
        taken = outputs[one.request_id]
        assert taken[-1].finish_reason in ("stop", "length"), taken[-1].error
        if taken[-1].finish_reason == "stop":
            jsonschema.validate(json.loads(world.text(taken)), schema)
            finished += 1
    assert finished >= 20  # the model is random and its tokens are bytes: some run into the limit
