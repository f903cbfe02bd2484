"""The offline API in process: on a tiny random Llama, and once on the packaged model."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from engine import LLM, Grammar
from engine.completion import Completion
from engine.errors import ConfigError, ModelError, PromptTooLongError, RequestError, UnsupportedError
from engine.grammar import pool as pool_module
from engine.protocol import SamplingParams, TokenOutput
from tests.support.tiny_models import write_tiny_llama

MAX_MODEL_LEN = 256
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"), max_positions=MAX_MODEL_LEN)


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with open_llm(model) as opened:
        yield opened


def open_llm(model: Path, **settings: object) -> LLM:
    sizes = {"kv_cache_memory_bytes": 2**22, "block_size": 16, "max_running": 8, "threads": 1}
    return LLM(str(model), dtype="float32", numerics="invariant", **{**sizes, **settings})


def is_idle(llm: LLM) -> bool:
    assert llm._core is not None
    llm._core.check_integrity()
    return not llm._core.has_work and llm._core.load().running == 0


def stop_string_in(completion: Completion) -> str:
    """A few characters of the text that stand for themselves, from its middle."""
    text = completion.text
    for at in range(2, len(text) - 2):
        if "\ufffd" not in text[at : at + 2]:
            return text[at : at + 2]
    raise AssertionError(f"no usable stop string in {text!r}")


def test_one_prompt_gives_one_completion_in_every_shape(llm: LLM) -> None:
    as_text = llm.generate("hello", GREEDY)
    assert len(as_text) == 1
    completion = as_text[0]
    assert completion.finish_reason == "length"
    assert len(completion.token_ids) == 12
    assert completion.text == llm.codec.decode(completion.token_ids)
    assert (completion.usage.prompt_tokens, completion.usage.completion_tokens) == (5, 12)
    assert completion.logprobs is None
    assert completion.stop_reason is None
    ids = llm.codec.encode("hello", parse_special=True)
    for shape in (["hello"], ids, [ids], tuple(ids)):
        assert [other.token_ids for other in llm.generate(shape, GREEDY)] == [completion.token_ids]


def test_no_prompts_give_no_completions(llm: LLM) -> None:
    assert llm.generate([], GREEDY) == []
    assert llm.chat([], GREEDY) == []


def test_many_prompts_come_back_in_order_and_equal_to_each_alone(llm: LLM) -> None:
    prompts = [f"prompt {number} " + "x" * (number * 7 % 40) for number in range(20)]
    params = [
        SamplingParams(
            temperature=(0.0, 0.8, 1.3)[number % 3],
            top_p=(1.0, 0.9)[number % 2],
            seed=number - 10,
            max_tokens=3 + number % 9,
            logprobs=(None, 0, 2)[number % 3],
            ignore_eos=True,
        )
        for number in range(20)
    ]
    together = llm.generate(prompts, params)
    for number in (0, 1, 7, 12, 19):
        alone = llm.generate(prompts[number], params[number])[0]
        assert alone.token_ids == together[number].token_ids
        assert alone.logprobs == together[number].logprobs
        assert len(alone.token_ids) == params[number].max_tokens
    assert len({completion.token_ids for completion in together}) == 20
    assert is_idle(llm)


def test_more_prompts_than_the_queue_holds_all_finish(model: Path, llm: LLM) -> None:
    prompts = [f"{number}" for number in range(25)]
    with open_llm(model, max_running=2, max_waiting=3) as small:
        assert [c.token_ids for c in small.generate(prompts, GREEDY)] == [
            c.token_ids for c in llm.generate(prompts, GREEDY)
        ]


def test_without_sampling_the_models_own_defaults_hold(llm: LLM) -> None:
    assert (llm.default_sampling.temperature, llm.default_sampling.top_k) == (0.7, 20)
    assert llm.default_sampling.top_p == 1.0
    seen: list[SamplingParams] = []
    core = llm._core
    assert core is not None
    submit = core.submit
    core.submit = lambda request: (seen.append(request.sampling), submit(request))[1]  # type: ignore[method-assign]
    try:
        llm.generate("x" * (MAX_MODEL_LEN - 4))
    finally:
        del core.submit  # type: ignore[method-assign]
    assert [(params.temperature, params.top_k) for params in seen] == [(0.7, 20)]


def test_logprobs_have_one_entry_per_token(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=5, logprobs=3, ignore_eos=True)
    completion = llm.generate("logprobs", params)[0]
    assert completion.logprobs is not None
    assert len(completion.logprobs) == len(completion.token_ids) == 5
    for token, entry in zip(completion.token_ids, completion.logprobs, strict=True):
        assert entry.top_ids[0] == token
        assert entry.logprob == entry.top_logprobs[0] <= 0
        assert len(entry.top_ids) == 3


def test_a_stop_string_cuts_text_tokens_logprobs_and_usage(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=40, logprobs=0, ignore_eos=True)
    whole = llm.generate("stop here", params)[0]
    stop = stop_string_in(whole)
    stopped = llm.generate(["stop here"] * 3, params, stop=[stop, "never in there"])
    for completion in stopped:
        assert completion.text == whole.text[: whole.text.index(stop)]
        assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
        count = len(completion.token_ids)
        assert completion.token_ids == whole.token_ids[:count]
        assert stop in llm.codec.decode(completion.token_ids)
        assert stop not in llm.codec.decode(completion.token_ids[:-1])
        assert completion.logprobs is not None
        assert completion.usage.completion_tokens == count == len(completion.logprobs)
    assert llm.generate("stop here", params, stop=stop)[0].text == stopped[0].text
    assert is_idle(llm)


def test_a_stop_token_is_counted_and_named_but_not_shown(llm: LLM) -> None:
    whole = llm.generate("stop token", GREEDY)[0]
    token = next(t for t in whole.token_ids[3:] if t not in whole.token_ids[:3] and not llm.codec.is_special(t))
    at = whole.token_ids.index(token)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, stop_token_ids=(token,))
    completion = llm.generate("stop token", params)[0]
    assert completion.token_ids == whole.token_ids[: at + 1]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", token)
    assert completion.text == llm.codec.decode(whole.token_ids[:at])


def test_a_repeated_prompt_reports_cached_tokens(llm: LLM) -> None:
    prompt = "a prompt of several blocks that nobody else uses: " * 2
    first, second = (llm.generate(prompt, GREEDY)[0] for _ in range(2))
    assert first.usage.cached_tokens == 0
    assert second.usage.cached_tokens == len(prompt) // 16 * 16
    assert second.token_ids == first.token_ids


def test_chat_renders_the_template_for_one_conversation_and_for_several(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "hi <s> there"}]
    completion = llm.chat(conversation, GREEDY)[0]
    raw = "<s>user\nhi <s> there</s>\n<s>assistant\n"
    assert llm.generate(raw, GREEDY)[0].token_ids == completion.token_ids
    assert completion.usage.prompt_tokens == len(llm.codec.encode(raw, parse_special=True))
    other = [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "u"}]}]
    several = llm.chat([conversation, other], GREEDY)
    assert several[0].token_ids == completion.token_ids
    assert several[1].token_ids == llm.generate("<s>system\ns</s>\n<s>user\nu</s>\n<s>assistant\n", GREEDY)[0].token_ids


BAD_CALLS = {
    "prompts": [{"prompts": 5}, {"prompts": None}],
    "prompts[0]": [
        {"prompts": ""},
        {"prompts": b"bytes"},
        {"prompts": [[]]},
        {"prompts": ["\ud800"]},
        {"prompts": [[1.5]]},
        {"prompts": [[-1]]},
        {"prompts": [2**70]},
        {"prompts": [1, "text"]},
        {"prompts": [{"role": "user"}]},
    ],
    "prompts[2]": [{"prompts": ["a", "b", "x" * MAX_MODEL_LEN]}, {"prompts": ["a", [5], [260]]}],
    "temperature": [{"sampling": SamplingParams(temperature=-1.0)}],
    "top_p": [{"sampling": SamplingParams(top_p=0.0)}],
    "max_tokens": [{"sampling": SamplingParams(max_tokens=-1)}],
    "sampling": [{"sampling": [GREEDY] * 2}, {"sampling": {"temperature": 0}}],
    "sampling[0]": [{"sampling": [{"temperature": 0}]}],
    "sampling[1].min_p": [{"prompts": ["a", "b"], "sampling": [GREEDY, SamplingParams(min_p=2.0)]}],
    "stop": [{"stop": [""]}, {"stop": [1]}, {"stop": ""}],
    "grammar": [
        {"grammar": "[a-z]+"},
        {"grammar": {"type": "object"}},
        {"grammar": [None, None]},
        {"grammar": Grammar("regex", "(")},
        {"grammar": Grammar("regex", "a" * 200_000)},
        {"grammar": Grammar.of_schema({"type": "nothing"})},
        {"grammar": Grammar.of_choices([])},
    ],
    "grammar[0]": [{"grammar": ["[a-z]+"]}],
    "grammar[1]": [{"prompts": ["a", "b"], "grammar": [Grammar("json_object"), Grammar("json_schema", "{")]}],
}


@pytest.mark.parametrize(("param", "call"), [(param, call) for param, calls in BAD_CALLS.items() for call in calls])
def test_a_bad_call_names_the_parameter_and_runs_nothing(llm: LLM, param: str, call: dict[str, object]) -> None:
    core = llm._core
    assert core is not None
    before = core.load().prompt_tokens_total
    with pytest.raises(RequestError) as caught:
        llm.generate(**{"prompts": "a", "sampling": GREEDY, **call})  # type: ignore[arg-type]
    assert caught.value.param == param
    assert core.load().prompt_tokens_total == before


def test_a_prompt_that_is_too_long_tells_both_numbers(llm: LLM) -> None:
    with pytest.raises(PromptTooLongError, match=f"{MAX_MODEL_LEN} tokens, but the prompt has 300"):
        llm.generate(["fine", "x" * 300], GREEDY)


@pytest.mark.parametrize(
    ("param", "conversations"),
    [
        ("conversations", "hi"),
        ("conversations[0]", [[]]),
        ("conversations[1]", [[{"role": "user", "content": "a"}], "hi"]),
        ("conversations[0][0]", [["hi"]]),
        ("conversations[0][1]", [{"role": "user", "content": "a"}, {"content": "b"}]),
        ("conversations[0][0].content", [{"role": "user", "content": 5}]),
        ("conversations[1]", [[{"role": "user", "content": "a"}], [{"role": "user", "content": "x" * 300}]]),
    ],
)
def test_a_bad_conversation_is_named(llm: LLM, param: str, conversations: Sequence[object]) -> None:
    with pytest.raises(RequestError) as caught:
        llm.chat(conversations, GREEDY)  # type: ignore[arg-type]
    assert caught.value.param == param


def test_a_model_without_a_template_generates_but_does_not_chat(tmp_path: Path) -> None:
    directory = write_tiny_llama(tmp_path, max_positions=64, layers=1)
    (directory / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    with open_llm(directory) as plain:
        with pytest.raises(UnsupportedError, match="chat template"):
            plain.chat([{"role": "user", "content": "a"}], GREEDY)
        assert plain.generate("a", GREEDY)[0].finish_reason == "length"


def test_an_interruption_leaves_the_engine_empty_and_usable(llm: LLM) -> None:
    expected = llm.generate(["one", "two"], GREEDY)
    core = llm._core
    assert core is not None
    step, steps = core.step, 0

    def interrupted() -> list[TokenOutput]:
        nonlocal steps
        steps += 1
        if steps == 4:
            raise KeyboardInterrupt
        return step()

    core.step = interrupted  # type: ignore[method-assign]
    try:
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["one", "two", "three"], GREEDY)
    finally:
        core.step = step  # type: ignore[method-assign]
    assert is_idle(llm)
    assert [c.token_ids for c in llm.generate(["one", "two"], GREEDY)] == [c.token_ids for c in expected]


def test_calls_from_several_threads_take_turns(llm: LLM) -> None:
    expected = {prompt: llm.generate(prompt, GREEDY)[0].token_ids for prompt in ("t0", "t1", "t2")}
    found: dict[str, tuple[int, ...]] = {}

    def call(prompt: str) -> None:
        found[prompt] = llm.generate(prompt, GREEDY)[0].token_ids

    threads = [threading.Thread(target=call, args=(prompt,)) for prompt in expected]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == expected


def test_the_bar_counts_prompts_when_asked_for_and_hides_otherwise(
    llm: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    llm.generate(["a", "b"], GREEDY)
    llm.generate(["a", "b"], GREEDY, progress=False)
    assert capsys.readouterr().err == ""
    llm.generate(["a", "b"], GREEDY, progress=True)
    assert "2/2" in capsys.readouterr().err


def test_a_grammar_holds_for_all_prompts_or_each_has_its_own(llm: LLM) -> None:
    sampling = SamplingParams(temperature=1.0, seed=4, max_tokens=60)
    for completion in llm.generate(["a", "b", "c"], sampling, grammar=Grammar.of_choices(["yes", "no"])):
        assert completion.text in ("yes", "no")
        assert completion.finish_reason == "stop"
    schema = {
        "type": "object",
        "properties": {"n": {"enum": [1, 22]}},
        "required": ["n"],
        "additionalProperties": False,
    }
    own = [
        Grammar.of_schema(schema),
        Grammar("regex", "[0-9]{3}"),
        None,
        Grammar("grammar", 'start: "<" /[a-c]{2}/ ">"'),
        Grammar("grammar", 'root ::= "(" [a-c]+ ")"'),
        Grammar("json_object"),
    ]
    texts = [completion.text for completion in llm.generate(["p"] * len(own), sampling, grammar=own)]
    assert json.loads(texts[0])["n"] in (1, 22)
    assert re.fullmatch("[0-9]{3}", texts[1])
    assert re.fullmatch("<[abc]{2}>", texts[3])
    assert re.fullmatch(r"\([abc]+\)?", texts[4])
    assert texts[5].startswith("{")
    chats = [[{"role": "user", "content": "?"}]] * 2
    assert [one.text for one in llm.chat(chats, sampling, grammar=[Grammar("regex", "ab"), Grammar("regex", "c")])] == [
        "ab",
        "c",
    ]
    assert is_idle(llm)


def test_more_grammars_than_may_be_compiled_at_once_all_finish(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "MAX_QUEUED", 2)
    monkeypatch.setattr(pool_module, "MAX_CACHED", 1)  # so that the core compiles all of them again
    with open_llm(model) as small:
        grammars = [Grammar("regex", f"a{{{count}}}") for count in range(1, 13)]
        texts = [one.text for one in small.generate(["p"] * 12, SamplingParams(max_tokens=20), grammar=grammars)]
        assert texts == ["a" * count for count in range(1, 13)]


def test_close_is_final_and_may_be_repeated(model: Path) -> None:
    opened = open_llm(model)
    opened.close()
    opened.close()
    with pytest.raises(RuntimeError, match="closed"):
        opened.generate("a", GREEDY)


def test_bad_settings_and_models_are_refused_in_one_line(model: Path) -> None:
    with pytest.raises(ConfigError, match="'temperature' is not a setting"):
        LLM(str(model), temperature=0.5)
    with pytest.raises(ConfigError, match="max_running"):
        LLM(str(model), max_running="many")
    with pytest.raises(ModelError, match="no-such-model"):
        LLM("no-such-model")


def test_the_packaged_model_knows_the_capital_of_france() -> None:
    with LLM(max_running=2, max_model_len=512, threads=1) as smollm2:
        params = SamplingParams(temperature=0.0, max_tokens=24)
        completion = smollm2.chat([{"role": "user", "content": "What is the capital of France?"}], params)[0]
        advised = smollm2.default_sampling
    assert "Paris" in completion.text
    assert completion.finish_reason == "stop"
    assert "<|im_end|>" not in completion.text
    assert (advised.temperature, advised.top_p) == (0.2, 0.9)
