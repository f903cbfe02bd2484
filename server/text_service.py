"""Text to token ids and back for one served model, off the event loop. Knows codec and template, but no HTTP.

Rendering a template and tokenising a long prompt take milliseconds, so both run in a few threads with a bounded queue.
Turning output tokens into text takes microseconds and stays on the loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from engine.errors import PressureError, RequestError, UnsupportedError
from engine.protocol import Engine, EngineInfo
from engine.text.chat import ChatTemplate, Message
from engine.text.tokenizer import TextCodec

T = TypeVar("T")

THREADS = 2
MAX_QUEUED = 512


class TextService:
    """Owns the threads; `close` ends them."""

    def __init__(self, info: EngineInfo, codec: TextCodec, template: ChatTemplate | None) -> None:
        self.info = info
        self.codec = codec
        self.template = template
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="text")
        self._queued = 0

    @classmethod
    async def open(cls, engine: Engine, info: EngineInfo) -> TextService:
        """Fetch the model's text assets from the engine and build codec and template."""
        text = info.text
        references = [text.tokenizer] + ([text.chat_template] if text.chat_template else [])
        assets = {reference.digest: await engine.fetch_asset(reference.digest) for reference in references}
        codec = await asyncio.to_thread(TextCodec.from_assets, text, assets, vocab_size=info.vocab_size)
        return cls(info, codec, ChatTemplate.from_assets(text, assets))

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def prompts_ids(self, prompts: Sequence[str | list[int]], *, add_special_tokens: bool) -> list[list[int]]:
        """Tokenise the raw prompts of one request; those that are token ids already stay as they are."""
        encode = self.codec.encode

        def encode_all() -> list[list[int]]:
            return [
                encode(prompt, add_bos=add_special_tokens, parse_special=True) if isinstance(prompt, str) else prompt
                for prompt in prompts
            ]

        return await self._in_thread(encode_all)

    async def chat_ids(
        self, messages: Sequence[Message], *, add_generation_prompt: bool, continue_final_message: bool
    ) -> list[int]:
        """Render a conversation and tokenise it; the template itself writes the special tokens."""
        template = self.template
        if template is None:
            raise UnsupportedError(
                "The model has no chat template; start the server with --chat-template or use /v1/completions.",
                param="messages",
            )

        def render_and_encode() -> list[int]:
            text = template.render(messages, add_generation_prompt=add_generation_prompt)
            if continue_final_message:
                text = _cut_after_last_message(text, messages[-1]["content"])
            return self.codec.encode(text, parse_special=True, param="messages")

        return await self._in_thread(render_and_encode)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        if self._queued >= MAX_QUEUED:
            raise PressureError("Too many prompts wait to be tokenised.")
        self._queued += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, work)
        finally:
            self._queued -= 1


def _cut_after_last_message(rendered: str, content: object) -> str:
    """Drop what the template writes after the last message, so that the model goes on inside it."""
    text = content.strip() if isinstance(content, str) else ""
    start = rendered.rfind(text)
    if not text or start < 0:
        raise RequestError(
            "The final message has no text that the chat template shows, so it cannot be continued.",
            param="continue_final_message",
        )
    return rendered[: start + len(text)]
