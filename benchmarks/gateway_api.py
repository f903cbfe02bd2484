"""An API process that also notes when the token ids of each request were there: `... NOTES_FILE`, its spec on stdin.

For benchmarks/gateway.py. Notes are written when the process ends, in seconds of the clock that all processes share.
"""

from __future__ import annotations

import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from engine.protocol import GenerateRequest, TokenOutput
from router.supervisor import Supervisor
from server import api_process
from server.text_service import TextService

T = TypeVar("T")


class Notes:
    """What tokenising and routing have in common is the list of ids itself."""

    def __init__(self) -> None:
        self.tokenised_s: dict[str, float] = {}
        self._by_list: dict[int, float] = {}

    def watch(self) -> None:
        in_thread, prompts_ids, generate = TextService.in_thread, TextService.prompts_ids, Supervisor.generate

        async def noted_in_thread(text: TextService, work: Callable[[], T]) -> T:
            return await in_thread(text, lambda: self._noted(work()))

        async def noted_prompts_ids(
            text: TextService, prompts: Sequence[str | list[int]], *, add_special_tokens: bool, keep: int | None = None
        ) -> list[list[int]]:
            return self._noted(await prompts_ids(text, prompts, add_special_tokens=add_special_tokens, keep=keep))

        def noted_generate(supervisor: Supervisor, request: GenerateRequest) -> AsyncIterator[TokenOutput]:
            if (at_s := self._by_list.pop(id(request.prompt_ids), None)) is not None:
                self.tokenised_s[request.request_id] = at_s
            return generate(supervisor, request)

        TextService.in_thread = noted_in_thread  # type: ignore[assignment, method-assign]
        TextService.prompts_ids = noted_prompts_ids  # type: ignore[assignment, method-assign]
        Supervisor.generate = noted_generate  # type: ignore[assignment, method-assign]

    def _noted(self, result: T) -> T:
        """The ids of one prompt, or a list of such."""
        now_s = time.monotonic()
        if isinstance(result, list):
            for ids in (result, *result[:1]):
                self._by_list[id(ids)] = now_s
        return result


def main(notes_file: Path) -> None:
    notes = Notes()
    notes.watch()
    api_process.main()
    notes_file.write_bytes(msgspec.msgpack.encode(notes.tokenised_s))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
