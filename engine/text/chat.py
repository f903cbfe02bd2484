"""Chat templates: OpenAI messages in, one prompt text out, through Jinja in a sandbox.

Owns how messages are brought into the shape that a template expects. Knows neither token ids nor HTTP. A template comes
with the model and is trusted like its weights; what it is fed comes from anybody. Rendering takes from microseconds to
milliseconds: callers keep it off their event loop.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import NoReturn, cast

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.errors import ModelError, RequestError
from engine.protocol import TextAssets

Message = Mapping[str, object]

_MAX_CHARACTERS = 32 * 1024 * 1024
"""Far above any model's window: a rendering that passes it is a runaway loop."""

_RESERVED = frozenset({"messages", "tools", "add_generation_prompt"})


class ChatTemplate:
    """One compiled template; immutable, shared by all requests and threads.

    How `content` reaches it: a string as it is. A list of text parts becomes one string, joined with newlines, unless
    the template loops over `content` itself: then it gets the parts, and if it never asks whether something is a
    string, strings become one text part as well. No content (None) is "". Any other kind of part is refused.
    `takes_tools` tells whether it ever looks at tools.
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, str] | None = None, *, max_characters: int = _MAX_CHARACTERS
    ) -> None:
        """`special_tokens` are template variables, "bos_token" and so on. Raises ModelError for a broken template."""
        environment = _environment()
        try:
            tree = environment.parse(source)
            self._template = environment.from_string(source)
        except (TemplateError, RecursionError, ArithmeticError, MemoryError, ValueError) as error:
            # Besides faults of form: nested without end, and constant expressions, which are computed here.
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            raise ModelError(
                f"The chat template does not compile: {reason}.", hint="Another one can be given with --chat-template."
            ) from error
        self._special_tokens = dict(special_tokens or {})
        self._max_characters = max_characters
        self._takes_parts = _loops_over_content(tree)
        self.takes_tools = any(name.name == "tools" for name in tree.find_all(nodes.Name))
        self._takes_strings = not self._takes_parts or any(test.name == "string" for test in tree.find_all(nodes.Test))

    @classmethod
    def from_assets(cls, text: TextAssets, assets: Mapping[str, bytes]) -> ChatTemplate | None:
        """`assets` are files by digest, as `Engine.fetch_asset` returns them. None for a model without a template."""
        if text.chat_template is None:
            return None
        return cls(assets[text.chat_template.digest].decode(), text.special_tokens)

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """Return the prompt. `variables` are the request's own (chat_template_kwargs).

        Raises RequestError naming the message, or `messages` for what the template itself refuses or trips over.
        """
        variables = variables or {}
        taken = _RESERVED.intersection(variables)
        if taken:
            raise RequestError(f"{min(taken)!r} cannot be set this way.", param="chat_template_kwargs")
        context = {
            "documents": None,
            **self._special_tokens,
            **variables,
            "messages": [self._prepare(message, f"messages[{i}]") for i, message in enumerate(messages)],
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        pieces: list[str] = []
        size = 0
        try:
            for piece in self._template.generate(context):
                size += len(piece)
                if size > self._max_characters:
                    raise _Refusal(f"the prompt has more than {self._max_characters} characters")
                pieces.append(piece)
        except Exception as error:  # A template is a program: on data that it did not expect, anything can come out.
            raise RequestError(_explain(error), param="messages") from error
        return "".join(pieces)

    def _prepare(self, message: Message, where: str) -> dict[str, object]:
        prepared = dict(message)
        prepared["content"] = self._content(message.get("content"), f"{where}.content")
        if message.get("tool_calls"):
            prepared["tool_calls"] = _tool_calls(message["tool_calls"], f"{where}.tool_calls")
        return prepared

    def _content(self, content: object, where: str) -> object:
        if content is None:
            content = ""
        if isinstance(content, str):
            return content if self._takes_strings else [{"type": "text", "text": content}]
        if not isinstance(content, Sequence):
            raise RequestError("Content must be a string or a list of parts.", param=where, value=content)
        texts = [_part_text(part, f"{where}[{i}]") for i, part in enumerate(content)]
        return [{"type": "text", "text": text} for text in texts] if self._takes_parts else "\n".join(texts)


class _Refusal(Exception):
    """The template called raise_exception: its message is meant for the user."""


def _explain(error: Exception) -> str:
    if isinstance(error, _Refusal):
        return f"The chat template refuses these messages: {error}."
    reason = " ".join(str(error).split())[:300]
    return f"The chat template cannot render these messages: {type(error).__name__}: {reason}."


def _part_text(part: object, where: str) -> str:
    if not isinstance(part, Mapping):
        raise RequestError("A content part must be an object.", param=where, value=part)
    if part.get("type") != "text":
        raise RequestError(
            f"Content parts of type {part.get('type')!r} are not supported, only 'text'.", param=f"{where}.type"
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise RequestError("A text part needs a string in 'text'.", param=f"{where}.text", value=text)
    return text


def _tool_calls(calls: object, where: str) -> list[object]:
    """OpenAI sends arguments as a string of JSON; templates are written for the object in it."""
    if not isinstance(calls, Sequence) or not all(isinstance(call, Mapping) for call in calls):
        raise RequestError("tool_calls must be a list of objects.", param=where)
    return [_with_arguments(call, f"{where}[{i}].function.arguments") for i, call in enumerate(calls)]


def _with_arguments(call: Mapping[str, object], where: str) -> Mapping[str, object]:
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(cast(str, function["arguments"]) or "{}")
    except (ValueError, RecursionError) as error:
        raise RequestError("Arguments of a tool call must be JSON.", param=where) from error
    if not isinstance(arguments, dict):
        raise RequestError("Arguments of a tool call must be a JSON object.", param=where)
    return {**call, "function": {**function, "arguments": arguments}}


def _loops_over_content(tree: nodes.Template) -> bool:
    """Whether a loop runs over `x.content`, `x['content']` or a variable that was set to one of them."""
    names = {
        assign.target.name
        for assign in tree.find_all(nodes.Assign)
        if isinstance(assign.target, nodes.Name) and _is_content(assign.node)
    }
    loops = [loop.iter for loop in tree.find_all(nodes.For)]
    return any(_is_content(over) or (isinstance(over, nodes.Name) and over.name in names) for over in loops)


def _is_content(node: nodes.Node) -> bool:
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    return isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) and node.arg.value == "content"


def _environment() -> ImmutableSandboxedEnvironment:
    """What templates on model hubs are written for."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _GenerationTag(Extension):
    """{% generation %} marks the assistant's tokens for training; here its body is rendered as if it were not there."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes for HTML, which a prompt is not."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise _Refusal(message)


def _strftime_now(layout: str) -> str:
    """Local time, as the templates' authors have it."""
    return datetime.now().strftime(layout)
