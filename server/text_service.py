"""Text to token ids and back for one served model, off the event loop. Knows codec and template, but no HTTP.

Rendering a template and tokenising a long prompt take milliseconds, so both run in a few threads with a bounded queue.
Turning output tokens into text takes microseconds and stays on the loop.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from engine.errors import PressureError, PromptTooLongError, RequestError, UnsupportedError
from engine.grammar.pool import TIME_LIMIT_S, GrammarPool
from engine.protocol import Engine, EngineInfo, Grammar
from engine.text.chat import ChatTemplate, Message
from engine.text.tokenizer import TextCodec
from engine.validation import sequence_window

T = TypeVar("T")

THREADS = 2
MAX_QUEUED = 512
MAX_COUNTED_CHARACTERS = 1_000_000
"""Of a text that is tokenised for its own sake and not to be run."""


class TextService:
    """Owns the threads; `close` ends them."""

    def __init__(self, info: EngineInfo, codec: TextCodec, template: ChatTemplate | None) -> None:
        self.info = info
        self.codec = codec
        self.template = template
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="text")
        self._grammars = GrammarPool.of(codec, info.vocab_size, info.eos_ids)
        self._queued = 0

    @classmethod
    async def open(cls, engine: Engine, info: EngineInfo) -> TextService:
        """Fetch the model's text assets from the engine and build codec and template."""
        text = info.text
        references = [text.tokenizer] + ([text.chat_template] if text.chat_template else [])
        assets = {reference.digest: await engine.fetch_asset(reference.digest) for reference in references}
        codec = await asyncio.to_thread(TextCodec.from_assets, text, assets, vocab_size=info.vocab_size)
        service = cls(info, codec, ChatTemplate.from_assets(text, assets))
        await service.warm_up()
        return service

    async def warm_up(self) -> None:
        """Do what the first grammar would wait for."""
        await asyncio.wrap_future(self._grammars.warm_up())

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._grammars.close()

    async def prompts_ids(
        self,
        prompts: Sequence[str | list[int]],
        *,
        add_special_tokens: bool,
        keep: int | None = None,
        to_run: bool = True,
    ) -> list[list[int]]:
        """Tokenise the raw prompts of one request; those that are token ids already stay as they are. Of each the last
        `keep` tokens are returned. What is not `to_run` need not fit the window."""
        encode = partial(self._encode, param="prompt", add_bos=add_special_tokens, keep=keep, to_run=to_run)
        start = 0 if keep is None else -keep

        def encode_all() -> list[list[int]]:
            return [encode(prompt) if isinstance(prompt, str) else prompt[start:] for prompt in prompts]

        # Ids alone are sliced sooner than a thread is woken.
        return await self.in_thread(encode_all) if any(isinstance(one, str) for one in prompts) else encode_all()

    async def bad_word_ids(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Tokenise words as they stand at the start of a text and behind a space."""

        def encode_all() -> tuple[tuple[int, ...], ...]:
            forms = [form for word in words for form in (word.lstrip(), " " + word.lstrip())]
            ids = [tuple(self.codec.encode(form, parse_special=True, param="bad_words")) for form in forms]
            return tuple(dict.fromkeys(filter(None, ids)))

        return await self.in_thread(encode_all) if words else ()

    async def chat_ids(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        variables: Mapping[str, object] | None = None,
        tools: Sequence[Mapping[str, object]] | None = None,
        keep: int | None = None,
        to_run: bool = True,
    ) -> list[int]:
        """Render a conversation and tokenise it; the template itself writes the special tokens. `keep` and `to_run` as
        in `prompts_ids`."""
        template = self.template
        if template is None:
            raise UnsupportedError(
                "The model has no chat template; start the server with --chat-template or use /v1/completions.",
                param="messages",
            )

        if tools and not template.takes_tools:
            raise UnsupportedError("The model's chat template knows no tools.", param="tools")
        render = partial(
            template.render, add_generation_prompt=add_generation_prompt, variables=variables, tools=tools or None
        )
        encode = partial(self._encode, param="messages", keep=keep, to_run=to_run)

        def render_and_encode() -> list[int]:
            if not continue_final_message:
                return encode(render(messages))
            mark = secrets.token_hex(16) + " "  # not to be guessed by who writes the messages
            return encode(_cut_at_mark(render([*messages[:-1], _with_mark(messages[-1], mark)]), mark))

        return await self.in_thread(render_and_encode)

    def _encode(
        self, text: str, param: str, *, add_bos: bool = False, keep: int | None = None, to_run: bool = True
    ) -> list[int]:
        """Tokenise what may fit the window. A megabyte takes a second, so what cannot fit is refused by its length."""
        if keep is not None or not to_run:
            if len(text) > MAX_COUNTED_CHARACTERS:
                raise RequestError(f"At most {MAX_COUNTED_CHARACTERS} characters are tokenised at once.", param=param)
            ids = self.codec.encode(text, parse_special=True, add_bos=add_bos, param=param)
            return ids if keep is None else ids[-keep:]
        window = sequence_window(self.info)
        least = -(-len(text) // self.codec.longest_token)
        if least > window:
            raise RequestError(
                f"This model's maximum context length is {window} tokens, but the prompt has {len(text)} characters,"
                f" which are {least} tokens at the very least.",
                param=param,
                value=len(text),
                code=PromptTooLongError.code,
            )
        ids = self.codec.encode(text, parse_special=True, add_bos=add_bos, param=param)
        if len(ids) >= window:  # said here, before the other prompts of the request are tokenised
            raise PromptTooLongError(len(ids), window, param=param)
        return ids

    async def compile(self, grammar: Grammar) -> None:
        """Raise RequestError, without a param, for a grammar that does not compile, or not in time."""
        try:
            # Several may share the work: who leaves does not end it.
            await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(self._grammars.submit(grammar))), TIME_LIMIT_S)
        except TimeoutError as error:
            raise RequestError(f"it was not compiled within {TIME_LIMIT_S:g} s") from error

    async def shown_text(self, token_ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens by name. Raises RequestError for ids outside of the vocabulary."""
        return await self.in_thread(lambda: self.codec.decode(token_ids, show_special=True))

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Do work with text off the loop. Raises PressureError when too much of it waits."""
        if self._queued >= MAX_QUEUED:
            raise PressureError("Too many prompts wait to be tokenised.")
        self._queued += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, work)
        finally:
            self._queued -= 1


def _with_mark(message: Message, mark: str) -> Message:
    """Put `mark` behind the text of a message. No search for the text itself would do: templates write "<|im_end|>"
    behind an "i"."""
    content = message["content"]
    if isinstance(content, str) and content.strip():
        return {**message, "content": content + mark}
    last = content[-1] if isinstance(content, list) and content else None
    if isinstance(last, dict) and isinstance(last.get("text"), str):
        return {**message, "content": [*content[:-1], {**last, "text": last["text"] + mark}]}  # type: ignore[index]
    raise _cannot_continue()


def _cut_at_mark(rendered: str, mark: str) -> str:
    """Drop what the template writes behind the last message, so that the model goes on inside it. A mark that has lost
    the space at its end was trimmed by the template, which would have trimmed the message alike."""
    at = rendered.rfind(mark.rstrip())
    if at < 0:
        raise _cannot_continue()
    return rendered[:at] if rendered.startswith(mark, at) else rendered[:at].rstrip()


def _cannot_continue() -> RequestError:
    return RequestError(
        "The final message has no text that the chat template shows, so it cannot be continued.",
        param="continue_final_message",
    )
