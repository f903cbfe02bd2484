"""Grammars over a tiny vocabulary: what their masks allow, when they are complete, how they are compiled."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence

import pytest

from engine.errors import ConfigError, PressureError, RequestError
from engine.grammar import pool as pool_module
from engine.grammar import registry
from engine.grammar.base import Backend, CompiledGrammar, GrammarError, Matcher, Vocabulary, mask_bytes
from engine.grammar.llguidance_backend import LLGuidanceBackend
from engine.grammar.pool import GrammarPool
from engine.grammar.regex_size import added_by_repetitions
from engine.grammar.registry import open_backend
from engine.protocol import Grammar
from tests.support.tiny_grammars import EOS_ID, VOCAB_SIZE, allowed, grammar_pool, ids_of, vocabulary

DONE_S = 20.0
SCHEMA = json.dumps({"type": "object", "properties": {"a": {"enum": [1, 12]}}, "required": ["a"]})


@pytest.fixture(scope="module")
def pool() -> Iterator[GrammarPool]:
    with grammar_pool() as one:
        yield one


def start(pool: GrammarPool, kind: str, source: str, output: str = "") -> Matcher:
    grammar = pool.submit(Grammar(kind, source)).result(DONE_S)  # type: ignore[arg-type]
    return grammar.start(ids_of(output))


def test_a_mask_has_a_bit_per_token_in_whole_words(pool: GrammarPool) -> None:
    assert mask_bytes(VOCAB_SIZE) == 8
    assert mask_bytes(64) == 8
    assert len(start(pool, "regex", "a").mask()) == 8


@pytest.mark.parametrize(
    ("kind", "source", "output", "next_tokens"),
    [
        ("regex", "a(b|c)d", "", {"a"}),
        ("regex", "a(b|c)d", "a", {"b", "c"}),
        ("regex", "ab*", "a", {"b", "<end>"}),
        ("regex", "[0-9]{2}", "1", set("0123456789")),
        ("choice", '["yes", "yellow", "no"]', "", {"y", "n"}),
        ("choice", '["yes", "yellow", "no"]', "ye", {"s", "l"}),
        ("choice", '["a", "ab"]', "a", {"b", "<end>"}),
        ("grammar", 'start: "(" start ")" | "x"', "((", {"(", "x"}),
        ("grammar", 'start: "(" start ")" | "x"', "((x", {")"}),
        ("grammar", 'root ::= "(" root ")" | x\nx ::= [xy]{1,2} # two', "((", {"(", "x", "y"}),
        ("grammar", 'root ::= "(" root ")" | x\nx ::= [xy]{1,2} # two', "((xy", {")"}),
        ("grammar", 'root ::= "\\u0061" "\\x62" [\\u0061-\\u0063]', "ab", {"a", "b", "c"}),
        ("grammar", '// "::=" is no rule\nstart: "::=" | "a"', "", {":", "a"}),
        ("json_schema", SCHEMA, '{"a":1', {"2", "}", ","} | {" "}),
        ("json_schema", '{"const": null}', "nul", {"l"}),
        ("json_object", "", "", {"{"}),
    ],
)
def test_a_mask_allows_what_can_follow(
    pool: GrammarPool, kind: str, source: str, output: str, next_tokens: set[str]
) -> None:
    assert allowed(start(pool, kind, source, output).mask()) == next_tokens


def test_a_grammar_is_complete_when_nothing_can_follow(pool: GrammarPool) -> None:
    matcher = start(pool, "regex", "ab?")
    assert not matcher.advance(*ids_of("a"))
    assert matcher.advance(*ids_of("b"))


def test_the_end_token_completes_a_grammar_that_accepts(pool: GrammarPool) -> None:
    matcher = start(pool, "regex", "ab*")
    assert not matcher.advance(*ids_of("a"))
    assert matcher.advance(EOS_ID)


def test_replay_leads_to_the_state_of_step_by_step(pool: GrammarPool) -> None:
    text = '{"a": 12}'
    stepped = start(pool, "json_schema", SCHEMA)
    for length, token_id in enumerate(ids_of(text)):
        assert stepped.mask() == start(pool, "json_schema", SCHEMA, text[:length]).mask()
        complete = stepped.advance(token_id)
        assert complete == (length == len(text) - 1)


def test_matchers_of_one_grammar_do_not_know_each_other(pool: GrammarPool) -> None:
    one, other = start(pool, "regex", "ab"), start(pool, "regex", "ab")
    one.advance(*ids_of("a"))
    assert allowed(other.mask()) == {"a"}


def test_a_wrong_token_fails_and_then_nothing_is_allowed(pool: GrammarPool) -> None:
    matcher = start(pool, "regex", "ab")
    with pytest.raises(GrammarError):
        matcher.advance(*ids_of("x"))
    assert matcher.error
    assert allowed(matcher.mask()) == set()
    with pytest.raises(GrammarError, match="does not match"):
        start(pool, "regex", "ab", "x")


def test_masks_made_together_come_in_the_order_of_their_matchers(pool: GrammarPool) -> None:
    outputs = ["", "[", "[1", "[1,", "[1,2", "[1,2]"] * 10  # more than one task
    schema = '{"type": "array", "items": {"enum": [1, 2]}, "maxItems": 2}'
    matchers = [start(pool, "json_schema", schema, output) for output in outputs]
    matchers.append(start(pool, "regex", "ab"))
    with pytest.raises(GrammarError):
        matchers[-1].advance(*ids_of("x"))
    masks = pool.masks(matchers).join()
    assert masks == b"".join(matcher.mask() for matcher in matchers)
    assert len(masks) == len(matchers) * mask_bytes(VOCAB_SIZE)
    assert pool.masks([]).join() == b""


def test_a_closed_pool_takes_nothing() -> None:
    with grammar_pool() as pool:
        assert allowed(start(pool, "regex", "a").mask()) == {"a"}
    with pytest.raises(RuntimeError, match="closed"):
        pool.submit(Grammar("regex", "b"))


def test_white_space_in_json_is_bounded(pool: GrammarPool) -> None:
    assert " " in allowed(start(pool, "json_object", "", "{").mask())
    assert " " not in allowed(start(pool, "json_object", "", "{ ").mask())


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("json_schema", '{"type": "not-a-type"}'),
        ("json_schema", "{"),
        ("json_schema", ""),
        ("json_schema", "3"),
        ("json_schema", "false"),
        ("json_schema", '{"$ref": "#"}'),
        ("json_schema", '{"$ref": "http://localhost/a"}'),
        ("json_schema", '{"type": "string", "pattern": "("}'),
        ("json_schema", '{"anyOf":[' * 3000 + "{}" + "]}" * 3000),
        ("json_schema", '{"multipleOf": 10007}'),
        ("json_schema", '{"type": "integer", "multiple\\u004ff" : 9999991}'),
        ("json_schema", '{"anyOf": [{"multipleOf": 101}, {"items": {"multipleOf": 0.103}}]}'),
        ("json_schema", '{"multipleOf": 1' + "1" * 100 + "}"),
        ("grammar", 'start: %json {"multipleOf": 9999991}'),
        ("grammar", "root ::= nothing"),
        ("grammar", 'root ::= "a'),
        ("grammar", 'rule ::= "a"'),
        ("grammar", "root ::= " + "(" * 50_000),
        ("grammar", "root ::= " + "a{" + "9" * 5000 + "}"),
        ("grammar", "\n".join(f"r{i} ::= r{i + 1}" for i in range(5000))),
        ("regex", "("),
        ("regex", "(" * 20_000 + ")" * 20_000),
        ("regex", r"\bfoo\b"),
        ("grammar", ""),
        ("grammar", "start: nothing"),
        ("grammar", "start: start"),
        ("grammar", "start: " + "(" * 5000 + '"a"' + ")" * 5000),
        ("choice", "[]"),
        ("choice", '["a", ""]'),
        ("choice", '"a"'),
        ("choice", "[" * 100_000),
    ],
)
def test_what_cannot_be_used_is_told_in_one_short_line(pool: GrammarPool, kind: str, source: str) -> None:
    with pytest.raises(RequestError) as caught:
        start(pool, kind, source)
    message = str(caught.value)
    assert message
    assert "\n" not in message
    assert len(message) < 400
    assert "<state>" not in message


@pytest.mark.parametrize("number", ["0.01", "1e-7", "5", "7", "60", "1000000", "9973", "-3"])
def test_common_multiples_are_taken(pool: GrammarPool, number: str) -> None:
    assert allowed(start(pool, "json_schema", f'{{"type": "number", "multipleOf": {number}}}').mask())


def test_a_look_for_multiples_takes_no_time_for_any_text() -> None:
    """It would take minutes if it went back; pytest's limit is the measure."""
    for text in ('\\"' * 64_000, '"' * 128_000, '"":' + " " * 128_000, '"\\' * 64_000):
        with pytest.raises(RequestError):
            LLGuidanceBackend(vocabulary()).compile(Grammar("json_schema", text))


def test_a_look_for_repetitions_takes_no_time_for_any_text() -> None:
    """The same: brackets, escapes and slashes that never end."""
    for text in ("[" * 128_000, "[" * 64_000 + "\\]" * 32_000, "\\p{" * 40_000, "{1" * 64_000, "(" * 128_000):
        with pytest.raises(RequestError):
            LLGuidanceBackend(vocabulary()).compile(Grammar("regex", text))
    for text in ("start: /" + "\\/" * 60_000, "start: " + "/\\/" * 40_000):
        with pytest.raises(RequestError):
            LLGuidanceBackend(vocabulary()).compile(Grammar("grammar", text))


def test_the_longest_chain_of_references_has_room_on_the_stack(pool: GrammarPool) -> None:
    depth = 4000
    chain = ",".join(f'"{i:x}":{{"items":{{"$ref":"#/{i + 1:x}"}}}}' for i in range(depth))
    source = f'{{"$ref":"#/0",{chain},"{depth:x}":{{}}}}'
    assert 120_000 < len(source) < 140_000
    try:
        matcher = start(pool, "json_schema", source)
    except RequestError:
        return  # refused: as good as compiled
    assert allowed(matcher.mask())


def test_equal_grammars_are_compiled_once_and_failures_are_not_kept(pool: GrammarPool) -> None:
    first = pool.submit(Grammar("regex", "once"))
    assert pool.submit(Grammar("regex", "once")) is first
    assert pool.submit(Grammar("choice", '["once"]')) is not first
    bad = pool.submit(Grammar("regex", "("))
    assert isinstance(bad.exception(DONE_S), RequestError)
    again = pool.submit(Grammar("regex", "("))
    assert isinstance(again.exception(DONE_S), RequestError)


def test_the_cache_and_the_queue_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    held = threading.Event()

    class Slow:
        def compile(self, grammar: Grammar) -> CompiledGrammar:
            assert held.wait(DONE_S)
            return Nothing()

    class Nothing:
        def start(self, output_ids: Sequence[int]) -> Matcher:
            raise GrammarError("nothing")

    monkeypatch.setitem(registry.BACKENDS, "slow", lambda words: Slow())
    monkeypatch.setattr(pool_module, "MAX_QUEUED", 5)
    monkeypatch.setattr(pool_module, "MAX_CACHED", 3)
    pool = GrammarPool(vocabulary, backend="slow")
    try:
        futures = [pool.submit(Grammar("regex", str(i))) for i in range(5)]
        with pytest.raises(PressureError):
            pool.submit(Grammar("regex", "one more"))
        held.set()
        for future in futures:
            future.result(DONE_S)
        assert pool.submit(Grammar("regex", "4")) is futures[4]
        assert pool.submit(Grammar("regex", "0")) is not futures[0]
    finally:
        held.set()
        pool.close()


def test_the_cache_is_bounded_by_the_memory_that_grammars_take(
    pool: GrammarPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    small, large = Grammar(kind="regex", source="a+"), Grammar(kind="regex", source="(a|b)" * 100)
    sizes = [pool_module.GRAMMAR_BYTES + pool_module.BYTES_PER_CHARACTER * len(one.source) for one in (small, large)]
    monkeypatch.setattr(pool_module, "MAX_CACHED_BYTES", sum(sizes))
    first, second = pool.submit(small), pool.submit(large)
    assert pool.submit(small) is first
    third = pool.submit(Grammar(kind="regex", source="b+"))
    assert third.result(60).start([]).mask()
    assert pool.submit(small) is first, "the least recently used one went"
    assert pool.submit(large) is not second
    monkeypatch.setattr(pool_module, "MAX_CACHED_BYTES", 0)
    alone = pool.submit(Grammar(kind="regex", source="c+"))
    assert alone.result(60).start([]).mask(), "one that is not kept serves its request"
    bad = pool.submit(Grammar(kind="regex", source="("))
    assert bad.exception(60) is not None
    assert pool._kept_bytes == 0


def test_an_unknown_back_end_is_told_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="llguidance"):
        open_backend("other", vocabulary())


def test_a_model_without_an_end_token_has_no_grammars() -> None:
    words = vocabulary()
    with pytest.raises(RequestError, match="end token"):
        open_backend(registry.DEFAULT, Vocabulary(words.tokens, (), (), words.encode))


def test_a_pool_that_was_warmed_up_opens_its_back_end_no_more() -> None:
    opened = []

    def vocabulary_once() -> Vocabulary:
        opened.append(1)
        return vocabulary()

    pool = GrammarPool(vocabulary_once)
    try:
        pool.warm_up().result(DONE_S)
        assert opened == [1]
        pool.warm_up().result(DONE_S)
        pool.submit(Grammar("regex", "a")).result(DONE_S)
        assert opened == [1]
    finally:
        pool.close()
    with pytest.raises(RuntimeError, match="closed"):
        pool.warm_up()


class _Panic(BaseException):
    """As the libraries raise where their own code has a fault: no Exception."""


def _panicking(vocabulary: Vocabulary) -> Backend:
    raise _Panic("index out of bounds")


def test_what_fails_while_warming_up_is_told_to_who_asks_for_a_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.BACKENDS, "panicking", _panicking)
    pool = GrammarPool(vocabulary, backend="panicking")
    try:
        pool.warm_up().result(DONE_S)
        error = pool.submit(Grammar("regex", "a")).exception(DONE_S)
        assert isinstance(error, RequestError)
        assert "index out of bounds" in str(error)
    finally:
        pool.close()


@pytest.mark.parametrize(
    ("pattern", "added"),
    [
        ("", 0),
        ("abc|defgh", 0),
        (r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", 36 - 5),
        ("a{3}{4}", 11),
        ("(ab|c{5}|){2,9}d*", 11 - 3),
        ("a{0,100000}", 0),
        ("a{2,}", 1),
        (r"\p{Lu}{7}\x{41}\{9", 6),
        ("[^]{5}]{6}", 5),
        ("a{b}{,3}", 0),
        (")(((x{4}", 3),
        ("{2}" * 1000, 0),
        ("a{" + "9" * 5000 + "}{9999}", 10**9 - 1),
    ],
)
def test_the_characters_that_repetitions_add_to_an_expression(pattern: str, added: int) -> None:
    assert added_by_repetitions(pattern) == added
