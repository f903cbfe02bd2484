"""Program for tests/engine/test_kv_store_disk_faults.py: a real engine whose disk tier lies on disks that fail.

python -m tests.support.store_victim MODEL DIRECTORY CASE...
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from engine.llm import LLM
from kvstore.disk import upkeep
from tests.support.failing_disks import fault, mount, remount
from tests.support.store_llm import engine
from tests.support.store_trial import Trial


class Victim:
    """Runs cases one after the other, each with an engine and a directory of its own."""

    def __init__(self, model: Path, directory: Path, plain: LLM) -> None:
        self._model, self._directory, self._plain = model, directory, plain

    def run(self, case: str) -> None:
        getattr(self, case)(self._directory / case)

    @contextmanager
    def _trial(self, root: Path) -> Iterator[Trial]:
        with engine(self._model, "ram=16MiB", f"disk={root},64MiB,min-free=4KiB") as llm:
            one = Trial(self._plain, llm)
            one.works()
            yield one

    def full(self, root: Path) -> None:
        """Nothing is left of a small disk, first because of the store and then because of others."""
        mount(root, "size=1m")
        with self._trial(root) as one:
            one.ask_until(lambda _: one.tier.stats().evictions_total > 20, "the disk is full")
            filler = root / "others"
            with filler.open("wb", buffering=0) as file:
                while (status := os.statvfs(root)).f_bavail > 8:
                    file.write(bytes(status.f_bsize * 4))
            for _ in range(5):
                one.ask()
            filler.unlink()
            one.works()

    def read_only(self, root: Path) -> None:
        mount(root, "size=64m")
        with self._trial(root) as one:
            remount(root, "ro")
            one.is_left_alone("save")
            one.ask_until(lambda tokens: tokens > 0, "loads go on")
            remount(root, "rw")
            one.works()

    def undeletable(self, root: Path) -> None:
        mount(root, "size=512k")
        with self._trial(root) as one:
            for path in sorted(root.rglob("*.kvb"))[:3]:
                subprocess.run(["mount", "--bind", path, path], check=True)
            one.ask_until(lambda _: one.tier.stats().evictions_total > 20, "others are evicted")
            one.works()

    def failing_reads(self, root: Path) -> None:
        self._while("r", root, "load")

    def failing_writes(self, root: Path) -> None:
        self._while("w", root, "save")

    def no_space(self, root: Path) -> None:
        """The disk says that it is full while it looks as if there was room, and evicting helps nothing."""
        self._while("f", root, "save")

    def hanging(self, root: Path) -> None:
        self._while("h", root, "load")

    def lying(self, root: Path) -> None:
        """What is written is not what will be read, and no error says so."""
        with self._trial(root) as one:
            fault("l")
            one.renew()
            one.ask_until(lambda _: bool(one.tier.stats().corrupt), "wrong bytes are found out")
            fault("")
            one.works()

    def _while(self, letter: str, root: Path, kind: str) -> None:
        with self._trial(root) as one:
            fault(letter)
            one.is_left_alone(kind)
            fault("")
            one.works()


if __name__ == "__main__":
    model, directory, *cases = sys.argv[1:]
    upkeep.WATCH_S = 0.2  # what failed is tried again so often
    with engine(Path(model)) as plain:
        victim = Victim(Path(model), Path(directory), plain)
        for case in cases:
            victim.run(case)
            print(case, flush=True)
