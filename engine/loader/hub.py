"""Models of a Hugging Face hub, fetched into its own cache: `org/name`, or `org/name@revision`.

huggingface_hub does the transfers, so its variables hold (HF_ENDPOINT, HF_TOKEN, HF_HOME, HF_HUB_OFFLINE), dropped
connections are resumed, and what other programs have fetched is found. Owns which files are wanted and how failures are
told. Knows nothing of what is in them, and imports no torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from engine.errors import ModelError

Progress = Callable[[int, int], None]
"""Called with (bytes so far, bytes in all); resumed and cached ones count."""

WANTED = ("*.json", "*.jinja", "model*.safetensors")
"""Of the repository's top folder: other folders and names hold other formats of the same weights."""

WEIGHTS = ".safetensors"
_NAME = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w][\w./-]*))?")
_ADVICE = "Is there a network, and is HF_ENDPOINT right? A model that was fetched before needs none."


@dataclass(frozen=True, slots=True)
class HubModel:
    repo: str
    revision: str = "main"

    def __str__(self) -> str:
        return self.repo if self.revision == "main" else f"{self.repo}@{self.revision}"


def parse(model: str) -> HubModel | None:
    """Return what `model` names if it looks like a hub id."""
    match = _NAME.fullmatch(model)
    if match is None:
        return None
    return HubModel(match["repo"], match["revision"] or "main")


def fetch(model: HubModel, on_progress: Progress, cache_dir: Path | None = None) -> Path:
    """Return the directory of the model's files, fetching what the cache lacks.

    Without a network, or with a hub that fails, a model that is in the cache is served from there. Raises ModelError;
    whatever `on_progress` raises passes through.
    """
    hub = _Hub(model, cache_dir)
    files = hub.list_files()
    if files is None:
        return hub.cached()
    if not any(name.endswith(WEIGHTS) for name in files.sizes):
        raise ModelError(
            f"The hub's repository {model} has no model*{WEIGHTS} files.",
            hint="Only safetensors weights are fetched from a hub. A GGUF file can be given by its path.",
        )
    return hub.download(files, on_progress)


@dataclass(frozen=True, slots=True)
class _Files:
    """Sizes in bytes by name, of one commit."""

    commit: str
    sizes: dict[str, int]


class _Hub:
    """Calls to huggingface_hub for one model, and their errors in our words."""

    def __init__(self, model: HubModel, cache_dir: Path | None) -> None:
        self._model, self._cache_dir = model, cache_dir
        # The library reads the variable once, when it is imported; a later change should hold too.
        self._endpoint = os.environ.get("HF_ENDPOINT") or None
        self._unreachable: Exception | None = None

    def list_files(self) -> _Files | None:
        """Return the wanted files, or None when the hub cannot be asked."""
        from huggingface_hub import HfApi

        try:
            found = HfApi(endpoint=self._endpoint).model_info(
                self._model.repo, revision=self._model.revision, files_metadata=True, timeout=20
            )
        except Exception as error:  # the transport's errors have classes of whatever library that is
            if (refusal := self._refusal(error)) is not None:
                raise refusal from error
            if not _is_transfer_error(error):
                raise
            self._unreachable = error
            return None
        sizes = {file.rfilename: file.size or 0 for file in found.siblings or () if _is_wanted(file.rfilename)}
        return _Files(found.sha or self._model.revision, sizes)

    def download(self, files: _Files, on_progress: Progress) -> Path:
        from huggingface_hub import hf_hub_download

        counter = _Counter(sum(files.sizes.values()), on_progress)
        try:
            for name, size in files.sizes.items():
                counter.begin()
                hf_hub_download(
                    self._model.repo,
                    name,
                    revision=files.commit,
                    cache_dir=self._cache_dir,
                    endpoint=self._endpoint,
                    tqdm_class=counter.bar_class(),
                )
                counter.end(size)
            return self._snapshot(local_files_only=False)
        except Exception as error:
            if counter.raised is error:
                raise
            raise self._download_error(error) from error

    def cached(self) -> Path:
        """Return the directory of an earlier download."""
        try:
            return self._snapshot(local_files_only=True)
        except Exception as error:
            reason = _first_line(self._unreachable or error)
            raise ModelError(
                f"The hub cannot be reached and {self._model} is not whole in the cache ({reason}).", hint=_ADVICE
            ) from (self._unreachable or error)

    def _snapshot(self, *, local_files_only: bool) -> Path:
        """Return the directory; with a network this also notes which commit the revision is."""
        from huggingface_hub import snapshot_download

        return Path(
            snapshot_download(
                self._model.repo,
                revision=self._model.revision,
                cache_dir=self._cache_dir,
                endpoint=self._endpoint,
                allow_patterns=list(WANTED),
                ignore_patterns=["*/*"],
                local_files_only=local_files_only,
                tqdm_class=_Counter(0, lambda done, total: None).bar_class(),
            )
        )

    def _refusal(self, error: Exception) -> ModelError | None:
        """Return what to say when the hub answered no."""
        from huggingface_hub.errors import (
            GatedRepoError,
            HfHubHTTPError,
            HFValidationError,
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )

        model = self._model
        if isinstance(error, GatedRepoError):
            return ModelError(
                f"The hub's repository {model.repo} is gated: its owner has to grant access.",
                hint="Ask for access on the repository's page, then set HF_TOKEN to a token of that account.",
            )
        if isinstance(error, RepositoryNotFoundError):
            return ModelError(
                f"The hub has no repository {model.repo} that may be read without or with the given token, and there"
                f" is no such directory here.",
                hint="Check the name. For a private repository set HF_TOKEN.",
            )
        if isinstance(error, RevisionNotFoundError):
            return ModelError(f"The hub's repository {model.repo} has no revision {model.revision!r}.")
        if isinstance(error, HFValidationError):
            return ModelError(f"{model} is no name of a hub's repository: {_first_line(error)}")
        if isinstance(error, HfHubHTTPError) and error.response.status_code in (401, 403):
            return ModelError(
                f"The hub refuses {model.repo} ({error.response.status_code}).",
                hint="Set HF_TOKEN to a token that may read it.",
            )
        return None

    def _download_error(self, error: Exception) -> Exception:
        refusal = self._refusal(error)
        if refusal is not None:
            return refusal
        if _is_transfer_error(error) or isinstance(error, OSError):
            return ModelError(
                f"The download of {self._model} broke off ({_first_line(error)}).",
                hint="Files that are whole are kept: the same command fetches the rest.",
            )
        return error


def _is_wanted(name: str) -> bool:
    return "/" not in name and any(fnmatchcase(name, pattern) for pattern in WANTED)


def _is_transfer_error(error: Exception) -> bool:
    """True for errors of the network, the server or the cache, which any of the libraries below may raise."""
    library = type(error).__module__.partition(".")[0]
    return isinstance(error, OSError) or library in ("httpx", "httpx2", "httpcore", "requests", "urllib3")


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".:")


class _Counter:
    """Bytes of all files together. `raised` is what the callback raised, to be told from the library's errors."""

    def __init__(self, total: int, on_progress: Progress) -> None:
        self.raised: BaseException | None = None
        self._total, self._on_progress = total, on_progress
        self._before = self._done = 0

    def begin(self) -> None:
        self._before = self._done

    def end(self, size: int) -> None:
        """Count a file that was in the cache, or whose transfer said less than its size."""
        self._report(self._before + size)

    def bar_class(self) -> type[Any]:
        """Return a class in the place of tqdm that reports to this counter and shows nothing."""
        from tqdm import tqdm

        counter = self

        class Bar(tqdm):  # type: ignore[type-arg]
            def __init__(self, *_: object, initial: float = 0, **__: object) -> None:
                self._transferred = int(initial)
                super().__init__(disable=True)

            def update(self, n: float | None = 1) -> None:
                self._transferred += int(n or 0)
                counter.transferred(self._transferred)

        return Bar

    def transferred(self, size: int) -> None:
        if self._total:
            self._report(min(self._before + size, self._total))

    def _report(self, done: int) -> None:
        self._done = max(self._done, done)
        try:
            self._on_progress(self._done, self._total)
        except BaseException as error:
            self.raised = error
            raise
