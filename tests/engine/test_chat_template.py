"""Chat templates: equal to transformers' rendering, and safe with what users send."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from engine.errors import ModelError, RequestError
from engine.protocol import AssetRef, TextAssets
from engine.text.chat import ChatTemplate
from tests.support.smollm2 import chat_template, codec

Messages = Sequence[Mapping[str, object]]

USER = {"role": "user", "content": "Hi"}
CONVERSATIONS: list[Messages] = [
    [USER],
    [{"role": "system", "content": "Be brief."}, USER],
    [USER, {"role": "assistant", "content": "Hello!"}, {"role": "user", "content": "And?\n"}],
    [{"role": "user", "content": "日本語 🎉 <b>&amp;</b> {{ 7 * 7 }} {% raw %} <|im_end|>"}],
    [{"role": "user", "content": ""}],
]

TOOLS_TEMPLATE = """{%- if tools %}
{% for tool in tools %}{{ tool | tojson }}
{{ tool | tojson(indent=2) }}
{% endfor %}{% endif %}
{% for m in messages %}
    {% if m.role == 'skip' %}{% continue %}{% endif %}
    {% if m.tool_calls %}
        {% for call in m.tool_calls %}{{ call.function.name }}={{ call.function.arguments | tojson }};{% endfor %}
    {% endif %}
{{ bos_token }}{% generation %}{{ m.content | trim }}{% endgeneration %}

{% if loop.index == 3 %}{% break %}{% endif %}
{% endfor %}
{% set ns = namespace(found=false) %}
{%- if style is defined %}{{ style }}{% endif %}"""
TOOLS = [
    {"type": "function", "function": {"name": "get", "description": "ünï <&'\">", "parameters": {"b": 1, "a": []}}}
]


def reference(source: str, messages: Messages, **options: object) -> str:
    rendered, _ = render_jinja_template([list(messages)], chat_template=source, **options)
    return rendered[0]


@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("prompt", [True, False])
def test_the_packaged_template_renders_as_in_transformers(messages: Messages, prompt: bool) -> None:
    ours = ChatTemplate(chat_template()).render(messages, add_generation_prompt=prompt)
    assert ours == reference(chat_template(), messages, add_generation_prompt=prompt)


@pytest.mark.parametrize("tools", [None, TOOLS])
def test_tags_filters_and_whitespace_are_transformers_own(tools: Sequence[Mapping[str, object]] | None) -> None:
    messages = [USER, {"role": "skip", "content": "no"}, {"role": "assistant", "content": " é "}, USER]
    ours = ChatTemplate(TOOLS_TEMPLATE, {"bos_token": "<s>"}).render(
        messages, tools=tools, variables={"style": "plain"}
    )
    assert ours == reference(TOOLS_TEMPLATE, messages, tools=tools, bos_token="<s>", style="plain")
    assert ("ünï <&'" in ours) == bool(tools)


def test_the_prompt_is_the_well_known_text_and_its_special_tokens_parse() -> None:
    prompt = ChatTemplate(chat_template()).render([{"role": "system", "content": "S"}, USER])
    assert prompt == "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    ids = codec().encode(prompt, parse_special=True)
    assert ids.count(1) == 3
    assert ids.count(2) == 2


def part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


LOOPING = "{% for m in messages %}{% for p in m['content'] %}[{{ p['text'] }}]{% endfor %}{% endfor %}"
EITHER = (
    "{% for m in messages %}{% set c = m.content %}{% if c is string %}{{ c }}"
    "{% else %}{% for p in c %}[{{ p.text }}]{% endfor %}{% endif %}{% endfor %}"
)
STRINGS = "{% for m in messages %}{{ m['content'] + ';' }}{% endfor %}"


@pytest.mark.parametrize(
    ("source", "content", "prompt"),
    [
        (STRINGS, "a", "a;"),
        (STRINGS, [part("a"), part("b")], "a\nb;"),
        (STRINGS, [], ";"),
        (STRINGS, None, ";"),
        (LOOPING, "ab", "[ab]"),
        (LOOPING, [part("a"), part("b")], "[a][b]"),
        (EITHER, "ab", "ab"),
        (EITHER, [part("a"), part("b")], "[a][b]"),
    ],
)
def test_content_reaches_a_template_in_the_shape_that_it_takes(source: str, content: object, prompt: str) -> None:
    assert ChatTemplate(source).render([{"role": "user", "content": content}]) == prompt


@pytest.mark.parametrize(
    ("content", "param"),
    [
        ([part("a"), {"type": "image_url", "image_url": {"url": "x"}}], "messages[1].content[1].type"),
        ([{"text": "a"}], "messages[1].content[0].type"),
        (["a"], "messages[1].content[0]"),
        ([{"type": "text"}], "messages[1].content[0].text"),
        ([{"type": "text", "text": 1}], "messages[1].content[0].text"),
        (7, "messages[1].content"),
        ({"type": "text", "text": "a"}, "messages[1].content"),
    ],
)
def test_content_that_is_no_text_is_refused_by_name(content: object, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        ChatTemplate(STRINGS).render([USER, {"role": "user", "content": content}])
    assert caught.value.param == param


def assistant_call(arguments: object) -> dict[str, object]:
    call = {"id": "1", "type": "function", "function": {"name": "get", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def test_arguments_of_tool_calls_reach_the_template_as_objects() -> None:
    source = "{% for m in messages %}{{ m.tool_calls[0].function.arguments.city }}{% endfor %}"
    for arguments in ('{"city": "Köln"}', {"city": "Köln"}):
        assert ChatTemplate(source).render([assistant_call(arguments)]) == "Köln"
    message = assistant_call("{}")
    ChatTemplate(source).render([message])
    assert message == assistant_call("{}")


@pytest.mark.parametrize("arguments", ["{", "[1]", "[" * 100_000])
def test_broken_arguments_are_refused_by_name(arguments: str) -> None:
    with pytest.raises(RequestError) as caught:
        ChatTemplate(STRINGS).render([USER, assistant_call(arguments)])
    assert caught.value.param == "messages[1].tool_calls[0].function.arguments"


@pytest.mark.parametrize(
    "source", ["{% if %}", "{{ x", "{% for a in b %}", "{{ x | nosuchfilter }}", "{% nosuchtag %}"]
)
def test_a_broken_template_is_a_model_error_in_one_line(source: str) -> None:
    with pytest.raises(ModelError, match="does not compile") as caught:
        ChatTemplate(source)
    assert "\n" not in str(caught.value)


def test_what_the_template_refuses_reaches_the_user() -> None:
    source = "{% if messages[0].role != 'user' %}{{ raise_exception('roles must alternate') }}{% endif %}"
    with pytest.raises(RequestError, match="roles must alternate") as caught:
        ChatTemplate(source).render([{"role": "assistant", "content": "a"}])
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    ["{{ messages[7].content }}", "{{ 1 + 'a' }}", "{{ 1 / 0 }}", "{{ messages | tojson(indent='x', bad=1) }}"],
)
def test_what_trips_a_template_is_the_request_s_error(source: str) -> None:
    with pytest.raises(RequestError) as caught:
        ChatTemplate(source).render([USER])
    assert caught.value.param == "messages"
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'a': 1}) }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{% for i in range(1000000) %}{% endfor %}",
    ],
)
def test_templates_are_kept_in_the_sandbox(source: str) -> None:
    messages = [dict(USER)]
    with pytest.raises(RequestError):
        ChatTemplate(source).render(messages)
    assert messages == [USER]


def test_a_runaway_template_is_cut_off() -> None:
    source = "{% for i in range(90000) %}{% for j in range(90000) %}{{ messages[0].content }}{% endfor %}{% endfor %}"
    with pytest.raises(RequestError, match="more than 1000 characters"):
        ChatTemplate(source, max_characters=1000).render([USER])


def test_the_request_s_variables_reach_the_template_but_replace_nothing() -> None:
    template = ChatTemplate("{{ thinking | default('unset') }}{{ eos_token }}", {"eos_token": "</s>"})
    assert template.render([USER]) == "unset</s>"
    assert template.render([USER], variables={"thinking": "on"}) == "on</s>"
    for name in ("messages", "tools", "add_generation_prompt"):
        with pytest.raises(RequestError) as caught:
            template.render([USER], variables={name: []})
        assert caught.value.param == "chat_template_kwargs"


def test_strftime_now_gives_todays_date() -> None:
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", ChatTemplate("{{ strftime_now('%Y-%m-%d') }}").render([USER]))


def test_a_template_comes_from_the_assets_where_there_is_one() -> None:
    text = TextAssets(tokenizer=AssetRef("t", 1), chat_template=AssetRef("c", 1), special_tokens={"bos_token": "<s>"})
    built = ChatTemplate.from_assets(text, {"c": b"{{ bos_token }}"})
    assert built is not None
    assert built.render([USER]) == "<s>"
    assert ChatTemplate.from_assets(TextAssets(tokenizer=AssetRef("t", 1)), {}) is None
