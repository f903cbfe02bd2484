"""A torch-free engine process whose tokens are text: `python -m tests.support.text_core ADDRESS STEP_S`, or without
arguments a core of a worker or a server, which reads its spec like the real one.

Every step gives each running request one letter of an endless alphabet, so the answer of any length is known. A prompt
of the one token POISON kills the process.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence

from engine.config import EngineConfig
from engine.errors import RequestError
from engine.protocol import CachedTokens, EngineLoad, GenerateRequest, TokenOutput
from engine.validation import validate
from server.core_process import CoreSpec, LoadedEngine, OnProgress, read_spec, run
from tests.support.fake_engine import tiny_info
from tests.support.tiny_text import byte_ids, text_assets

ALPHABET = byte_ids(b"abcdefghijklmnopqrstuvwxyz")
POISON = 0
MAX_MODEL_LEN = 100_000
CHILD_STEP_S = 0.005


def alphabet_text(length: int) -> str:
    return "".join(chr(ord("a") + index % 26) for index in range(length))


class TextCore:
    """One token per step and request; a step takes at least `step_s`."""

    made_progress = True

    def __init__(self, step_s: float) -> None:
        text, self.assets = text_assets()
        self.info = tiny_info(text, max_model_len=MAX_MODEL_LEN, kv_capacity_tokens=MAX_MODEL_LEN, max_running=4096)
        self._step_s = step_s
        self._next_step_s = 0.0
        self._steps = 0
        self._running: dict[str, tuple[GenerateRequest, int]] = {}
        self._ended: list[TokenOutput] = []

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._ended)

    def submit(self, request: GenerateRequest) -> None:
        if request.request_id in self._running:
            raise RequestError("the id is in use", param="request_id")
        if request.prompt_ids == [POISON]:
            os.kill(os.getpid(), signal.SIGKILL)
        self._running[request.request_id] = (validate(request, self.info), len(request.resume_ids))

    def finish(self, request_id: str, keep_tokens: int) -> None:
        self._end(request_id, "stop")

    def abort(self, request_id: str) -> None:
        self._end(request_id, "abort")

    def load(self) -> EngineLoad:
        return EngineLoad(running=len(self._running), steps_total=self._steps)

    def drain(self) -> None:
        pass

    def reset_prefix_cache(self) -> None:
        pass

    def step(self) -> list[TokenOutput]:
        time.sleep(max(0.0, self._next_step_s - time.monotonic()))
        self._next_step_s = time.monotonic() + self._step_s
        self._steps += 1
        outputs, self._ended = self._ended, []
        return outputs + [self._advance(*running) for running in list(self._running.values())]

    def _advance(self, request: GenerateRequest, index: int) -> TokenOutput:
        is_last = index + 1 == request.sampling.max_tokens
        self._running[request.request_id] = (request, index + 1)
        if is_last:
            del self._running[request.request_id]
        return TokenOutput(
            request.request_id,
            request.attempt,
            index,
            [ALPHABET[index % 26]],
            "length" if is_last else None,
            cached=CachedTokens() if index == len(request.resume_ids) else None,
        )

    def _end(self, request_id: str, reason: str) -> None:
        if request_id in self._running:
            request, index = self._running.pop(request_id)
            self._ended.append(TokenOutput(request_id, request.attempt, index, [], reason))  # type: ignore[arg-type]


def main(arguments: Sequence[str]) -> int:
    step_s = float(arguments[1]) if arguments else CHILD_STEP_S

    def load(config: EngineConfig, on_progress: OnProgress) -> LoadedEngine:
        core = TextCore(step_s)
        return LoadedEngine(core, core.info, core.assets)

    if not arguments:
        return run(read_spec(()), load)
    return run(CoreSpec(config=EngineConfig(), address=arguments[0], drain_timeout_s=0.0, log_level="warning"), load)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
