"""The KV store's tiers beside what the machine could do, in the same run.

    python -m benchmarks.kv_tiers DIRECTORY [--objects 200] [--rounds 5]

DIRECTORY is on the disk to measure and must be empty. Objects are those of a model of 8B parameters (1 MiB). Each round
measures the limit and then the tier, with the same bytes and the same number of threads; shown are medians, and the
ratio's range over the rounds. Limits: SHA-256 alone for keys, a copy for RAM, plain direct reads and writes of whole
files for the disk, reads of a dictionary for lookups. Loads include the check of every byte. Exits with 1 when a bar is
missed.
"""

from __future__ import annotations

import argparse
import hashlib
import mmap
import os
import shutil
import statistics
import sys
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from kvstore.batch import Batch
from kvstore.block_format import Identity, seal
from kvstore.disk.tier import READERS, WRITERS, DiskTier
from kvstore.keys import PUBLIC_SCOPE, KeyChain, owner_of
from kvstore.layout import GroupLayout
from kvstore.namespace import GroupShape, Namespace
from kvstore.object_key import ObjectKey
from kvstore.ram.tier import RamTier
from kvstore.tier import Deadline, Put, Tier, Want

BLOCK_SIZE = 64
NAMESPACE = Namespace(
    model="8b",
    weights_digest="benchmark",
    kv_dtype="bfloat16",
    rope="",
    groups=(GroupShape("full", tuple(range(32)), kv_heads=8, head_dim=128),),
    block_size=BLOCK_SIZE,
    numerics="",
)
PART = GroupLayout(NAMESPACE, 0).parts(1)[0]
CHAIN_TOKENS = 131_072
LIMIT_S = 120.0

BARS = {"keys": 0.6, "RAM save": 0.5, "RAM load": 0.5, "disk save": 0.85, "disk load": 0.85}
"""Least ratios to the limit."""


@dataclass
class Figure:
    """The limit's values and ours, a round each, in `unit`: rates, whose ratio is to be `least` or more, or times,
    whose ratio is to be `most` or less."""

    unit: str
    least: float | None = None
    most: float | None = None
    limits: list[float] = field(default_factory=list)
    ours: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        return statistics.median(self._ratios)

    @property
    def _ratios(self) -> list[float]:
        return [ours / limit for ours, limit in zip(self.ours, self.limits, strict=True)]

    @property
    def is_missed(self) -> bool:
        too_low = self.least is not None and self.ratio < self.least
        return too_low or (self.most is not None and self.ratio > self.most)

    def add(self, limit: float, ours: float) -> None:
        self.limits.append(limit)
        self.ours.append(ours)

    def show(self, name: str) -> str:
        limit, ours = statistics.median(self.limits), statistics.median(self.ours)
        spread = f"{min(self._ratios):.2f} to {max(self._ratios):.2f}"
        bar = "no bar"
        if self.least is not None or self.most is not None:
            bar = f"bar {self.least or self.most:.2f}" + (" at most" if self.most else "")
        return f"{name:10} {ours:8.2f} {self.unit}, limit {limit:8.2f}, ratio {self.ratio:.2f} ({spread}), {bar}"


class Objects:
    """`count` sealed objects, each on pages of its own."""

    def __init__(self, count: int) -> None:
        step = -(-PART.object_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        memory = memoryview(mmap.mmap(-1, count * step))
        self.views = [memory[start : start + PART.object_bytes] for start in range(0, count * step, step)]
        self.keys: list[ObjectKey] = []
        for number, view in enumerate(self.views):
            tokens = array("I", range(number, number + BLOCK_SIZE))
            block = KeyChain(PUBLIC_SCOPE, BLOCK_SIZE).extend(tokens)[0]
            self.keys.append(PART.key(NAMESPACE.digest, owner_of(PUBLIC_SCOPE), block))
            view[PART.header_bytes :] = os.urandom(4096) * (PART.payload_bytes // 4096)
            seal(view, Identity(self.keys[-1], PUBLIC_SCOPE, 0, tokens), PART)

    @property
    def size_bytes(self) -> int:
        return sum(view.nbytes for view in self.views)


def main() -> int:
    options = _options()
    objects, figures = Objects(options.objects), dict[str, Figure]()
    for _ in range(options.rounds):
        _keys(figures)
        _ram(figures, objects)
        _disk(figures, objects, options.directory)
    for name, figure in figures.items():
        print(figure.show(name))
    missed = [name for name, figure in figures.items() if figure.is_missed]
    print(f"bars missed: {', '.join(missed)}" if missed else "all bars held")
    return 1 if missed else 0


def _keys(figures: dict[str, Figure]) -> None:
    """Millions of tokens per second through the chain of block keys, and through SHA-256 alone."""
    tokens = array("I", range(CHAIN_TOKENS))
    block = tokens[:BLOCK_SIZE].tobytes()

    def limit() -> None:
        parent = PUBLIC_SCOPE
        for _ in range(CHAIN_TOKENS // BLOCK_SIZE):
            parent = hashlib.sha256(parent + block).digest()

    _add(
        figures, "keys", "Mtok/s", CHAIN_TOKENS / 1e6, limit, lambda: KeyChain(PUBLIC_SCOPE, BLOCK_SIZE).extend(tokens)
    )


def _ram(figures: dict[str, Figure], objects: Objects) -> None:
    tier = RamTier(2 * objects.size_bytes)
    sources = [np.frombuffer(view, np.uint8) for view in objects.views]
    target = np.empty(sources[0].size, np.uint8)
    copies = np.empty((len(sources), target.size), np.uint8)
    save_all(tier, objects)  # so that no page is touched for the first time below
    tier.delete(objects.keys)

    def copy_out() -> None:
        for row, source in zip(copies, sources, strict=True):
            np.copyto(row, source)

    copy_out()
    gigabytes = objects.size_bytes / 1e9
    _add(figures, "RAM save", "GB/s", gigabytes, copy_out, lambda: save_all(tier, objects))
    targets = [memoryview(row) for row in copies]
    _add(figures, "RAM load", "GB/s", gigabytes, copy_out, lambda: load_all(tier, objects.keys, targets))
    held = dict.fromkeys(objects.keys, 1)
    fresh = [ObjectKey.parse(key.name) for key in objects.keys]
    batch = Batch(1)
    count = len(fresh) / 1e6
    reads = lambda: [held.get(key) for key in fresh]  # noqa: E731
    _add(figures, "RAM probe", "M/s", count, reads, lambda: tier.probe(fresh, Deadline.after(LIMIT_S), batch.report))
    tier.close(Deadline.after(LIMIT_S))


def _disk(figures: dict[str, Figure], objects: Objects, directory: Path) -> None:
    raw = directory / "raw"
    raw.mkdir()
    paths = [raw / str(number) for number in range(len(objects.views))]

    def write(path: Path, view: memoryview) -> None:
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_DIRECT, 0o600)
        os.pwrite(fd, view, 0)
        os.close(fd)

    def read(path: Path, view: memoryview) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        os.preadv(fd, [view], 0)
        os.close(fd)

    tier = DiskTier(directory / "tier", 1 << 50, min_free_bytes=0, max_queued_bytes=1 << 50)
    if not tier.direct:
        sys.exit(f"{directory} is on a file system without direct I/O")
    gigabytes = objects.size_bytes / 1e9
    _add(
        figures,
        "disk save",
        "GB/s",
        gigabytes,
        lambda: _threads(WRITERS, write, paths, objects.views),
        lambda: save_all(tier, objects),
    )
    _add(
        figures,
        "disk load",
        "GB/s",
        gigabytes,
        lambda: _threads(READERS, read, paths, objects.views),
        lambda: load_all(tier, objects.keys, objects.views),
    )
    tier.close(Deadline.after(LIMIT_S))
    shutil.rmtree(raw)
    shutil.rmtree(directory / "tier")


def _threads(
    count: int, work: Callable[[Path, memoryview], None], paths: Sequence[Path], views: Sequence[memoryview]
) -> None:
    def run(first: int) -> None:
        for index in range(first, len(paths), count):
            work(paths[index], views[index])

    threads = [threading.Thread(target=run, args=(first,)) for first in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def save_all(tier: Tier, objects: Objects) -> None:
    batch = Batch(len(objects.keys))
    puts = [Put(key, (view,)) for key, view in zip(objects.keys, objects.views, strict=True)]
    tier.save(puts, Deadline.after(LIMIT_S), batch.report)
    _settle(batch)


def load_all(tier: Tier, keys: Sequence[ObjectKey], targets: Sequence[memoryview]) -> None:
    batch = Batch(len(keys))
    wants = [Want(key, target) for key, target in zip(keys, targets, strict=True)]
    tier.load(wants, Deadline.after(LIMIT_S), batch.report)
    _settle(batch)


def _settle(batch: Batch) -> None:
    if not batch.wait(Deadline.after(LIMIT_S)) or batch.leading != len(batch.outcomes):
        sys.exit(f"a tier failed: {next(one for one in batch.outcomes if one is None or one.status != 'ok')}")


def _add(
    figures: dict[str, Figure],
    name: str,
    unit: str,
    amount: float,
    limit: Callable[[], object],
    ours: Callable[[], object],
) -> None:
    rates = []
    for work in (limit, ours):
        begun = time.perf_counter()
        work()
        rates.append(amount / (time.perf_counter() - begun))
    figures.setdefault(name, Figure(unit, least=BARS.get(name))).add(*rates)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--objects", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    options.directory.mkdir(parents=True, exist_ok=True)
    if any(options.directory.iterdir()):
        parser.error(f"{options.directory} is not empty")
    return options


if __name__ == "__main__":
    sys.exit(main())
