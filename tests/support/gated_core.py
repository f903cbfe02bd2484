"""The engine's process with grammars that are not compiled before it is closed: `python -m tests.support.gated_core`.

Each grammar whose compiling begins adds a line to the file `compiling` in the model's directory.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import msgspec

from engine.config import EngineConfig
from engine.errors import RequestError
from engine.grammar import registry
from engine.grammar.base import CompiledGrammar
from engine.protocol import Grammar
from server.core_process import LoadedEngine, OnProgress, load_engine, read_spec, run


class _Gated:
    def __init__(self, journal: Path, gate: threading.Event) -> None:
        self._journal = journal
        self._gate = gate

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        with self._journal.open("a") as file:
            file.write(f"{grammar.source}\n")
        self._gate.wait()
        raise RequestError("the engine has been closed")


def load_gated(config: EngineConfig, on_progress: OnProgress) -> LoadedEngine:
    gate = threading.Event()
    journal = Path(config.model) / "compiling"
    journal.touch()
    registry.BACKENDS[registry.DEFAULT] = lambda vocabulary: _Gated(journal, gate)
    engine = load_engine(config, on_progress)

    def close() -> None:
        engine.close()
        gate.set()

    return msgspec.structs.replace(engine, close=close)


if __name__ == "__main__":
    sys.exit(run(read_spec(sys.argv[1:]), load_gated))
