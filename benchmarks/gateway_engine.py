"""An engine without a model, behind the real wire, for benchmarks/gateway.py: `... ADDRESS PACE_MS NOTES_FILE`.

A request's first token comes at once, the others with a pause between them, all streams of one moment in one message.
Text and template are SmolLM2's. When it is told to end it writes down when each request came and when its first token
went, in seconds of the clock that all processes of the machine share.
"""

from __future__ import annotations

import hashlib
import sys
import time
from pathlib import Path

import msgspec

from engine.config import EngineConfig
from engine.protocol import AssetRef, CachedTokens, EngineInfo, EngineLoad, GenerateRequest, TextAssets, TokenOutput
from server.core_process import CoreSpec, LoadedEngine, OnProgress, run
from tests.support.infos import engine_info
from tests.support.smollm2 import chat_template, tokenizer_bytes

MODEL = "fake"
FIRST_WORD_ID, WORDS = 1000, 4096
"""Token ids that are text by themselves."""


class Note(msgspec.Struct, array_like=True):
    """When a request came to the engine, and when its first token was handed to the wire."""

    came_s: float
    told_s: float = 0.0


def name_at_client(request: GenerateRequest) -> str:
    """Return the id under which the client of the wire knows it."""
    return request.request_id.partition("#")[0]


class _Running:
    __slots__ = ("due_s", "index", "request")

    def __init__(self, request: GenerateRequest, now_s: float) -> None:
        self.request = request
        self.index = len(request.resume_ids)
        self.due_s = now_s


class PacedCore:
    """One token per request whenever its time has come."""

    def __init__(self, pace_s: float) -> None:
        files = (tokenizer_bytes(), chat_template().encode())
        self.assets = {hashlib.sha256(data).hexdigest(): data for data in files}
        tokenizer, template = (AssetRef(digest, len(data)) for digest, data in self.assets.items())
        self.info: EngineInfo = engine_info(
            model=MODEL,
            max_model_len=8192,
            vocab_size=49152,
            kv_capacity_tokens=1_000_000,
            max_running=4096,
            text=TextAssets(tokenizer=tokenizer, chat_template=template),
        )
        self.notes: dict[str, Note] = {}
        self.made_progress = True
        self._pace_s = pace_s
        self._running: dict[str, _Running] = {}
        self._ended: list[TokenOutput] = []
        self._steps = 0

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._ended)

    def submit(self, request: GenerateRequest) -> None:
        now_s = time.monotonic()
        self.notes[name_at_client(request)] = Note(now_s)
        self._running[request.request_id] = _Running(request, now_s)

    def finish(self, request_id: str, keep_tokens: int) -> None:
        self._end(request_id, "stop")

    def abort(self, request_id: str) -> None:
        self._end(request_id, "abort")

    def load(self) -> EngineLoad:
        return EngineLoad(running=len(self._running), kv_blocks_total=15_000, steps_total=self._steps)

    def drain(self) -> None:
        """Whoever runs ends by itself."""

    def reset_prefix_cache(self) -> None:
        """There is none."""

    def step(self) -> list[TokenOutput]:
        """Return what is due. Streams of one pace stay together: what comes a little later waits for the others."""
        now_s = time.monotonic()
        outputs, self._ended = self._ended, []
        outputs += [self._advance(one, now_s) for one in list(self._running.values()) if one.due_s <= now_s]
        self.made_progress = bool(outputs)
        self._steps += self.made_progress
        return outputs

    def _advance(self, one: _Running, now_s: float) -> TokenOutput:
        request, index = one.request, one.index
        one.index += 1
        beats = int(now_s / self._pace_s) + 1
        one.due_s = beats * self._pace_s
        is_last = one.index == request.sampling.max_tokens
        if is_last:
            del self._running[request.request_id]
        is_first = index == len(request.resume_ids)
        if is_first:
            self.notes[name_at_client(request)].told_s = time.monotonic()
        return TokenOutput(
            request.request_id,
            request.attempt,
            index,
            [FIRST_WORD_ID + index % WORDS],
            "length" if is_last else None,
            cached=CachedTokens() if is_first else None,
        )

    def _end(self, request_id: str, reason: str) -> None:
        if (one := self._running.pop(request_id, None)) is not None:
            self._ended.append(TokenOutput(request_id, one.request.attempt, one.index, [], reason))  # type: ignore[arg-type]


def main(address: str, pace_ms: float, notes_file: Path) -> int:
    core = PacedCore(pace_ms / 1000)

    def load(config: EngineConfig, on_progress: OnProgress) -> LoadedEngine:
        return LoadedEngine(core, core.info, core.assets)

    code = run(CoreSpec(config=EngineConfig(), address=address, drain_timeout_s=0.0, log_level="warning"), load)
    notes_file.write_bytes(msgspec.msgpack.encode(core.notes))
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], float(sys.argv[2]), Path(sys.argv[3])))
