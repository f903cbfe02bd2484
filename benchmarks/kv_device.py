"""KV blocks between a GPU and the host's memory, beside what the bus can do, and what a running decode feels of it.

    python3 -m benchmarks.kv_device --model random:llama-3.1-8b [--out FILE] [--batches 1,64] [--sweep]

Objects are the store's (about 1 MiB each) and lie in a RAM tier's arena. The limit is one large copy from and to pinned
memory, measured in the same run: one direction at a time, and both at once. Then the engine decodes, with and without
copies at full speed beside it, in turns: its step is told as a multiple of the undisturbed one, and the copies' rate as
a share of the limit. `--sweep` compares the ways to copy. Before all that, blocks go out and come back elsewhere and
have to be equal.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.protocol import EngineInfo
from engine.runner.build import build_engine
from engine.runner.cuda_copies import CudaCopies
from engine.runner.cuda_driver import CudaDriver
from engine.runner.kv_cache import KVCache
from engine.runner.kv_memory import KVMemory
from kvstore.layout import GroupLayout
from kvstore.manager.contract import Piece
from kvstore.namespace import GroupShape, Namespace
from kvstore.ram.arena import Arena
from kvstore.ram.slabs import class_bytes
from server.bench.workloads import decode

SPARE_BLOCKS = 64
"""Of the cache, kept from the engine: what is written goes there."""

CONTEXT = 1024
LIMIT_BYTES = 256 << 20
STEPS = 150
SECONDS = 1.0
DEVICE = torch.device("cuda", 0)

Row = dict[str, object]


@dataclass(frozen=True)
class Way:
    """How objects are copied; `pinned` is their memory."""

    name: str
    pinned: bool = True
    batches: bool = True
    batch_bytes: int = 16 << 20
    direct_bytes: int = 64 << 10

    def copies(self) -> CudaCopies:
        driver = CudaDriver(batches=self.batches)
        return CudaCopies(DEVICE, driver=driver, batch_bytes=self.batch_bytes, direct_bytes=self.direct_bytes)


PACKED = 1 << 30
WAYS = [
    Way("default"),
    Way("packed", direct_bytes=PACKED),
    Way("direct", direct_bytes=0),
    Way("direct, a call for each copy", direct_bytes=0, batches=False),
    Way("packed, batches of 64 MiB", direct_bytes=PACKED, batch_bytes=64 << 20),
    Way("direct, batches of 4 MiB", direct_bytes=0, batch_bytes=4 << 20),
    Way("direct, memory not pinned", direct_bytes=0, pinned=False),
    Way("packed, memory not pinned", direct_bytes=PACKED, pinned=False),
]


class Objects:
    """The objects of `blocks` blocks, in an arena of their own, as pieces of those blocks or of others."""

    def __init__(self, info: EngineInfo, blocks: Sequence[int]) -> None:
        namespace = Namespace(
            model="m",
            weights_digest="w",
            kv_dtype=info.dtype,
            rope="",
            groups=tuple(GroupShape("full", one.layers, one.kv_heads, one.head_dim) for one in info.kv_groups),
            block_size=info.block_size,
            numerics="",
        )
        layout = GroupLayout(namespace, 0)
        cut = [(first, span, part) for first, span in layout.runs(len(blocks)) for part in layout.parts(span)]
        slot = max(class_bytes(part.object_bytes) for _, _, part in cut)
        self.arena = Arena(slot * len(cut))
        self.memory = self.arena.view(0, self.arena.capacity_bytes)
        for start in range(0, len(self.memory), 4096):
            self.memory[start] = 0
        self.pieces = []
        for number, (first, span, part) in enumerate(cut):
            start = number * slot + part.header_bytes
            payload = self.memory[start : start + part.payload_bytes]
            self.pieces.append(Piece(part, tuple(blocks[first : first + span]), payload, self.arena.address + start))

    @property
    def size_bytes(self) -> int:
        return sum(piece.payload.nbytes for piece in self.pieces)


@dataclass
class Traffic:
    """One direction at full speed in a thread of its own: calls of `calls` objects, until it is stopped."""

    call: Callable[[Sequence[Piece]], None]
    pieces: Sequence[Piece]
    per_call: int
    size_bytes: int = 0
    seconds: float = 0.0
    errors: list[BaseException] = field(default_factory=list)

    @contextmanager
    def running(self) -> Iterator[None]:
        stop = threading.Event()
        thread = threading.Thread(target=self._run, args=(stop,))
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
        if self.errors:
            raise self.errors[0]

    @property
    def gb_s(self) -> float:
        return self.size_bytes / self.seconds / 1e9

    def _run(self, stop: threading.Event) -> None:
        begin_s = time.perf_counter()
        try:
            while not stop.is_set():
                for start in range(0, len(self.pieces), self.per_call):
                    some = self.pieces[start : start + self.per_call]
                    self.call(some)
                    self.size_bytes += sum(piece.payload.nbytes for piece in some)
        except BaseException as error:
            self.errors.append(error)
        self.seconds = time.perf_counter() - begin_s


class Bench:
    def __init__(self, model: str, max_running: int) -> None:
        self.config = EngineConfig(model=model, max_running=max_running, max_step_tokens=8192, prefix_cache=False)
        self.info, self.runner, num_blocks, _ = build_engine(self.config, lambda fraction, phase: None)
        engine_blocks = tuple(count - SPARE_BLOCKS for count in num_blocks)
        self.core = EngineCore(self.info, self.config, self.runner, engine_blocks)
        spare = list(range(engine_blocks[0], num_blocks[0]))
        random.Random(0).shuffle(spare)
        self.out = Objects(self.info, spare)
        self.back = Objects(self.info, spare)
        self.rows: list[Row] = []

    @property
    def cache(self) -> KVCache:
        return self.runner.cache

    def note(self, name: str, **values: object) -> None:
        self.rows.append({"name": name, **values})
        shown = ", ".join(
            f"{key} {value:.3f}" if isinstance(value, float) else f"{key} {value}" for key, value in values.items()
        )
        print(f"{name}: {shown}", flush=True)

    @contextmanager
    def memory(self, way: Way) -> Iterator[KVMemory]:
        memory = KVMemory(self.cache, self.info.kv_groups, way.copies())
        try:
            if way.pinned:
                begin_s = time.perf_counter()
                pinned = memory.pin(self.out.memory) + memory.pin(self.back.memory)
                self.note("pinning", way=way.name, gib=pinned / 2**30, seconds=time.perf_counter() - begin_s)
            yield memory
        finally:
            memory.close()

    def check(self, way: Way) -> None:
        """Fill the spare blocks with random bytes, copy them out, clear them, copy them back: nothing may differ."""
        first = min(min(piece.block_ids) for piece in self.out.pieces)
        spare = [tensor[first:] for pair in self.cache.layers for tensor in pair]
        for tensor in spare:
            tensor.view(torch.uint8).random_(0, 256)
        before = [tensor.view(torch.uint8).clone() for tensor in spare]
        torch.cuda.synchronize()
        with self.memory(way) as memory:
            memory.read(self.out.pieces)
            for tensor in spare:
                tensor.view(torch.uint8).zero_()
            torch.cuda.synchronize()
            memory.write(self.out.pieces)
            equal = all(torch.equal(a, b.view(torch.uint8)) for a, b in zip(before, spare, strict=True))
        for tensor in spare:
            tensor.zero_()  # random bytes are no good neighbours: NaNs
        self.note("round trip", way=way.name, equal=equal)
        if not equal:
            sys.exit(f"blocks came back different: {way.name}")

    def copies(self, way: Way, limits: dict[str, float], per_call: int) -> None:
        with self.memory(way) as memory:
            for kind in ("read", "write", "both"):
                rates = [self._traffic(memory, kind, per_call, lambda: time.sleep(SECONDS)) for _ in range(3)]
                for name in rates[0]:
                    gb_s = statistics.median(rate[name] for rate in rates)
                    limit = limits[name if kind != "both" else f"{name} beside"]
                    self.note(f"{name}, {kind}", way=way.name, objects=per_call, gb_s=gb_s, of_limit=gb_s / limit)

    def decode(self, way: Way, batch: int, limits: dict[str, float], per_call: int) -> None:
        """Steps of a batch that decodes: undisturbed, and beside copies."""
        outputs = 14 * STEPS
        requests = decode(random.Random(1), self.info.vocab_size, batch, CONTEXT, outputs).requests
        for request in requests:
            self.core.submit(request)
        warm = self.core.load().decode_tokens_total + 20 * batch
        while self.core.load().decode_tokens_total < warm:
            self.core.step()
        with self.memory(way) as memory:
            times: dict[str, list[float]] = {}
            rates: dict[str, list[float]] = {}
            for kind in ("none", "read", "write", "both") * 3:
                steps: list[float] = []
                done = self._traffic(memory, kind, per_call, partial(self._steps, steps))
                times.setdefault(kind, []).append(statistics.median(steps) * 1e3)
                for name, rate in done.items():
                    rates.setdefault(f"{kind}: {name}", []).append(rate)
        base = statistics.median(times["none"])
        for kind, values in times.items():
            self.note(
                f"decode {batch} x {CONTEXT}",
                beside=kind,
                way=way.name,
                step_ms=statistics.median(values),
                slowdown=statistics.median(values) / base,
                **{name: statistics.median(some) for name, some in rates.items() if name.startswith(kind)},
            )
        for request in requests:
            self.core.abort(request.request_id)
        while self.core.has_work:
            self.core.step()

    def _steps(self, times: list[float]) -> None:
        for _ in range(STEPS):
            begin_s = time.perf_counter()
            self.core.step()
            times.append(time.perf_counter() - begin_s)

    def _traffic(self, memory: KVMemory, kind: str, per_call: int, work: Callable[[], None]) -> dict[str, float]:
        """Return GB/s of each direction that went on beside `work`."""
        out = Traffic(memory.read, self.out.pieces, per_call)
        back = Traffic(memory.write, self.back.pieces, per_call)
        if kind == "none":
            work()
            return {}
        if kind == "read":
            with out.running():
                work()
            return {"read": out.gb_s}
        if kind == "write":
            with back.running():
                work()
            return {"write": back.gb_s}
        with out.running(), back.running():
            work()
        return {"read": out.gb_s, "write": back.gb_s}


def measure_limits() -> dict[str, float]:
    """Return GB/s of large copies: "read" is from the device, "beside" is with the other direction going on too."""
    device = torch.empty(2, LIMIT_BYTES, dtype=torch.uint8, device=DEVICE)
    host = torch.zeros(2, LIMIT_BYTES, dtype=torch.uint8, pin_memory=True)
    streams = [torch.cuda.Stream(DEVICE) for _ in range(2)]  # type: ignore[no-untyped-call]
    moves = {"read": (host[0], device[0]), "write": (device[1], host[1])}

    def timed(names: Sequence[str], rounds: int = 8) -> dict[str, float]:
        spans = {}
        torch.cuda.synchronize()
        for name, stream in zip(names, streams, strict=False):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            target, source = moves[name]
            with torch.cuda.stream(stream):
                begin.record()
                for _ in range(rounds):
                    target.copy_(source, non_blocking=True)
                end.record()
            spans[name] = (begin, end)
        torch.cuda.synchronize()
        return {name: rounds * LIMIT_BYTES / begin.elapsed_time(end) / 1e6 for name, (begin, end) in spans.items()}

    timed(["read", "write"])
    limits = {**timed(["read"]), **timed(["write"])}
    beside = timed(["read", "write"])
    return limits | {f"{name} beside": rate for name, rate in beside.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="random:llama-3.1-8b")
    parser.add_argument("--batches", default="1,64", help="rows of the decode steps")
    parser.add_argument("--per-call", default="8,64", help="objects of one call")
    parser.add_argument("--sweep", action="store_true", help="compare the ways to copy")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    batches = [int(part) for part in options.batches.split(",")]
    calls = [int(part) for part in options.per_call.split(",")]
    ways = WAYS if options.sweep else WAYS[:1]
    limits = measure_limits()
    bench = Bench(options.model, max(batches))
    bench.note("limits", **limits)
    for way in ways:
        bench.check(way)
    for way in ways:
        for per_call in calls if way is ways[0] else calls[-1:]:
            bench.copies(way, limits, per_call)
    for way in ways[:3]:
        for batch in batches:
            bench.decode(way, batch, limits, calls[-1])
    if options.out is not None:
        record = {
            "benchmark": "kv_device",
            "model": options.model,
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "rows": bench.rows,
        }
        options.out.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
