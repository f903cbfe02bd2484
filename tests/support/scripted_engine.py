"""A torch-free engine that speaks the real wire from a real process: `python -m tests.support.scripted_engine`.

A token depends on the seed and its index alone, as the real engine's depends on its prefix, so that an undisturbed run
can be compared with a disturbed one. EngineConfig.model is the script: "ok", "bad-model",
"bad-config" or "crash-at-load". It can be held by signals (tests/support/holdable.py).
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from engine.config import EngineConfig
from engine.errors import ConfigError, DrainingError, ModelError, PressureError, PromptTooLongError, RequestError
from engine.protocol import (
    AssetRef,
    CachedTokens,
    EngineInfo,
    EngineLoad,
    FinishReason,
    GenerateRequest,
    TextAssets,
    TokenLogprobs,
    TokenOutput,
)
from server.core_process import CoreSpec, LoadedEngine, OnProgress, WireSecurity, read_spec, run
from server.parent_watch import child_command
from tests.support.holdable import hold_on_signal
from tests.support.infos import engine_info

POISON = 666
"""A prompt that begins with it kills the engine in its first step."""

BUG = 667
"""A prompt that begins with it makes submit() raise what is not of the error tree."""

SLOTS = 64
"""Where the configuration leaves them open."""

VOCAB = 1000
ASSET = bytes(range(256)) * 10_000
STEP_S = 0.001
"""What a step takes at least: a real one computes."""


def scripted_token(seed: int, index: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{index}".encode()).digest()[:4], "little") % VOCAB


def scripted_tokens(seed: int, count: int) -> list[int]:
    return [scripted_token(seed, index) for index in range(count)]


class ScriptedCore:
    """One token per step and request."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.steps = 0
        self.draining = False
        self.resets = 0
        self.made_progress = True
        self._running: dict[str, tuple[GenerateRequest, int]] = {}
        self._ended: list[TokenOutput] = []
        self._endings: Counter[str] = Counter()

    @property
    def running(self) -> list[GenerateRequest]:
        """In the order in which they came."""
        return [request for request, _ in self._running.values()]

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._ended)

    def submit(self, request: GenerateRequest) -> None:
        limit = self.config.max_model_len or 1 << 20
        if not request.prompt_ids:
            raise RequestError("The prompt is empty.", param="prompt", value=[])
        if request.prompt_ids[0] == BUG:
            raise ZeroDivisionError
        if len(request.prompt_ids) >= limit:
            raise PromptTooLongError(len(request.prompt_ids), limit, param="prompt")
        if self.draining:
            raise DrainingError("draining")
        if len(self._running) >= (self.config.max_running or SLOTS):
            raise PressureError("full", retry_after_s=0.25)
        if request.request_id in self._running:
            raise RequestError("the id is in use", param="request_id")
        self._running[request.request_id] = (request, len(request.resume_ids))

    def finish(self, request_id: str, keep_tokens: int) -> None:
        self._end(request_id, "stop")

    def abort(self, request_id: str) -> None:
        self._end(request_id, "abort")

    def drain(self) -> None:
        self.draining = True

    def reset_prefix_cache(self) -> None:
        self.resets += 1

    def load(self) -> EngineLoad:
        return EngineLoad(
            running=len(self._running),
            steps_total=self.steps,
            requests_total=dict(self._endings),
            draining=self.draining,
        )

    def step(self) -> list[TokenOutput]:
        time.sleep(STEP_S)
        self.steps += 1
        outputs, self._ended = self._ended, []
        for request_id, (request, index) in list(self._running.items()):
            if request.prompt_ids[0] == POISON:
                os.kill(os.getpid(), signal.SIGKILL)
            outputs.append(self._advance(request_id, request, index))
        return outputs

    def _advance(self, request_id: str, request: GenerateRequest, index: int) -> TokenOutput:
        sampling = request.sampling
        assert sampling.seed is not None
        is_last = index + 1 >= (sampling.max_tokens or 1 << 30)
        is_first = index == len(request.resume_ids)
        self._running[request_id] = (request, index + 1)
        if is_last:
            del self._running[request_id]
            self._endings["length"] += 1
        return TokenOutput(
            request_id,
            request.attempt,
            index,
            [scripted_token(sampling.seed, index)],
            "length" if is_last else None,
            logprobs=None if sampling.logprobs is None else [TokenLogprobs(-1.0 / (index + 1))],
            cached=CachedTokens(device=len(request.resume_ids) or 7) if is_first else None,
        )

    def _end(self, request_id: str, reason: FinishReason) -> None:
        if request_id in self._running:
            request, index = self._running.pop(request_id)
            self._endings[reason] += 1
            self._ended.append(TokenOutput(request_id, request.attempt, index, [], reason))


def scripted_info(config: EngineConfig) -> EngineInfo:
    return engine_info(
        model=config.model,
        incarnation="",
        architecture="scripted",
        max_model_len=config.max_model_len or 1 << 20,
        vocab_size=VOCAB,
        block_size=config.block_size,
        kv_capacity_tokens=1 << 20,
        max_running=config.max_running or SLOTS,
        text=TextAssets(tokenizer=AssetRef(hashlib.sha256(ASSET).hexdigest(), len(ASSET))),
    )


def load_scripted(config: EngineConfig, on_progress: OnProgress) -> LoadedEngine:
    on_progress(0.5, "Half of it is there.")
    match config.model:
        case "bad-model":
            raise ModelError("The file weights.bin ends too early.", hint="Fetch it again.")
        case "bad-config":
            raise ConfigError("There is no such device.", hint="Try --device cpu.")
        case "crash-at-load":
            os._exit(70)
    info = scripted_info(config)
    return LoadedEngine(ScriptedCore(config), info, {info.text.tokenizer.digest: ASSET})


class ScriptedProcess:
    """One engine process at `address`; `module` may also be the real one. `fields` are further ones of the spec."""

    def __init__(
        self, address: str, config: EngineConfig, module: str = "tests.support.scripted_engine", **fields: object
    ) -> None:
        self._module = module
        self._spec = CoreSpec(config=config, address=address, log_level="warning", **fields)  # type: ignore[arg-type]
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        fds = () if self._spec.listen_fd is None else (self._spec.listen_fd,)
        self._process = subprocess.Popen(child_command(self._module), stdin=subprocess.PIPE, pass_fds=fds)
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(self._spec) + b"\n")
        self._process.stdin.close()

    def signal(self, signum: int) -> None:
        assert self._process is not None
        self._process.send_signal(signum)

    def wait(self, timeout_s: float = 60.0) -> int:  # a real engine imports torch first
        assert self._process is not None
        return self._process.wait(timeout_s)

    async def died(self) -> int:
        return await asyncio.get_running_loop().run_in_executor(None, self.wait)

    def kill_and_wait(self) -> None:
        self.signal(signal.SIGKILL)
        self.wait()

    async def restart(self) -> None:
        """What the launcher does when the process has died."""
        await self.died()
        self.start()


@contextmanager
def scripted_process(
    address: str, *, listen_fd: int | None = None, security: dict[str, str] | None = None, **config: object
) -> Iterator[ScriptedProcess]:
    settings = EngineConfig(**{"model": "ok", "max_running": 4096, **config})  # type: ignore[arg-type]
    secured = None if security is None else WireSecurity(**security)
    with engine_process(address, settings, listen_fd=listen_fd, security=secured) as process:
        yield process


@contextmanager
def engine_process(
    address: str, config: EngineConfig, module: str = "tests.support.scripted_engine", **fields: object
) -> Iterator[ScriptedProcess]:
    process = ScriptedProcess(address, config, module, **fields)
    try:
        yield process
    finally:
        process.kill_and_wait()


if __name__ == "__main__":
    hold_on_signal()
    sys.exit(run(read_spec(sys.argv[1:]), load_scripted))
