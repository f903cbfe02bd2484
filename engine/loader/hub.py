"""Models of a Hugging Face hub, fetched into its own cache: `org/name` or `org/name@revision`, and a GGUF file of such
a repository as `org/name:Q4_K_M`, `org/name:file.gguf` or `org/name/file.gguf`.

huggingface_hub does the transfers, so its variables hold (HF_ENDPOINT, HF_TOKEN, HF_HOME, HF_HUB_OFFLINE), dropped
connections are resumed, and what other programs have fetched is found. Owns which files are wanted and how failures are
told. Knows nothing of what is in them, and imports no torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from engine.errors import ModelError

Progress = Callable[[int, int], None]
"""Called with (bytes so far, bytes in all); resumed and cached ones count."""

WANTED = ("*.json", "*.jinja", "model*.safetensors")
"""Of the repository's top folder: other folders and names hold other formats of the same weights."""

TEXT = ("*.json", "*.jinja")
"""Of these, what is no weights."""

WEIGHTS = ".safetensors"
GGUF = ".gguf"
_PART = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
MAX_LISTED_CHARS = 400
_NAME = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w][\w./-]*))?"
    r"(:(?P<file>[\w][\w./-]*)|/(?P<path>[\w][\w./-]*\.gguf))?"
)
MAX_REPO_CHARS = 96
_ADVICE = "Is there a network, and is HF_ENDPOINT right? A model that was fetched before needs none."


@dataclass(frozen=True, slots=True)
class HubModel:
    """`file` is a GGUF file of the repository, by its path there or by the kind of its weights (Q4_K_M)."""

    repo: str
    revision: str = "main"
    file: str | None = None

    def __str__(self) -> str:
        repo = self.repo if self.revision == "main" else f"{self.repo}@{self.revision}"
        return repo if self.file is None else f"{repo}:{self.file}"


def parse(model: str) -> HubModel | None:
    """Return what `model` names if it looks like a hub id."""
    match = _NAME.fullmatch(model)
    if match is None or match["repo"].endswith(GGUF):  # a file of this machine that is not there
        return None
    return HubModel(match["repo"], match["revision"] or "main", match["file"] or match["path"])


def check(model: str) -> None:
    """Raise ModelError for a hub id that no hub would have. `parse` knows it."""
    named = parse(model)
    repo = "" if named is None else named.repo
    if named is None or len(repo) > MAX_REPO_CHARS or re.search(r"--|\.\.|[.-](/|$)|\.git$", repo):
        raise ModelError(
            f"{repo[:MAX_REPO_CHARS] or model!r} is no name of a hub's repository, and no file or directory here."
        )


def fetch(model: HubModel, on_progress: Progress, cache_dir: Path | None = None) -> Path:
    """Return the directory of the model's files, or its GGUF file, fetching what the cache lacks.

    Without a network, or with a hub that fails, a model that is in the cache is served from there. Raises ModelError;
    whatever `on_progress` raises passes through.
    """
    hub = _Hub(model, cache_dir)
    listed = hub.list_files()
    if listed is None:
        return hub.cached()
    if model.file is not None:
        name = chosen_gguf(model, listed.sizes)
        return hub.download(_Files(listed.commit, {name: listed.sizes[name]}), on_progress) / name
    files = _Files(listed.commit, {name: size for name, size in listed.sizes.items() if _is_wanted(name)})
    if not any(name.endswith(WEIGHTS) for name in files.sizes):
        raise _without_safetensors(model, listed.sizes)
    return hub.download(files, on_progress)


def fetch_text(model: HubModel, cache_dir: Path | None = None) -> Path:
    """Return a directory with the repository's text files, fetching what the cache lacks. Raises ModelError."""
    hub = _Hub(model, cache_dir)
    listed = hub.list_files()
    if listed is None:
        return hub.cached(TEXT)
    sizes = {name: size for name, size in listed.sizes.items() if _is_wanted(name, TEXT)}
    return hub.download(_Files(listed.commit, sizes), lambda done, total: None)


def chosen_gguf(model: HubModel, names: Collection[str]) -> str:
    """Return the one of a repository's files that `model.file` means. Raises ModelError that lists what there is."""
    wanted = model.file or ""
    if wanted in names and wanted.endswith(GGUF):
        return wanted
    kind = re.compile(rf"(.*[-._/])?{re.escape(wanted)}\.gguf", re.IGNORECASE)
    found = [name for name in _gguf_names(names) if kind.fullmatch(name)]
    if len(found) == 1:
        return found[0]
    listed = ", ".join(found or _gguf_names(names)) or "none"
    problem = f"more than one GGUF file for {wanted!r}" if found else f"no GGUF file {wanted!r}"
    raise ModelError(
        f"The hub's repository {model.repo} has {problem}.",
        hint=f"It has: {_shortened(listed)}. Files in several parts cannot be served.",
    )


def _gguf_names(names: Collection[str]) -> list[str]:
    """Return the files that hold a language model whole: no parts, and no projectors of images."""
    ggufs = (name for name in names if name.endswith(GGUF) and not _PART.search(name))
    return sorted(name for name in ggufs if not name.rpartition("/")[2].startswith("mmproj"))


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_LISTED_CHARS else text[:MAX_LISTED_CHARS].rpartition(",")[0] + ", ..."


def _without_safetensors(model: HubModel, names: Collection[str]) -> ModelError:
    ggufs = _gguf_names(names)
    if ggufs:
        return ModelError(
            f"The hub's repository {model} has GGUF files only, and which is meant has to be said.",
            hint=f"Name one, such as {model}:{ggufs[0]}. It has: {_shortened(', '.join(ggufs))}.",
        )
    return ModelError(
        f"The hub's repository {model} has no model*{WEIGHTS} files.",
        hint="Only safetensors weights and GGUF files are fetched from a hub.",
    )


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
        """Return all files, or None when the hub cannot be asked."""
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
        sizes = {file.rfilename: file.size or 0 for file in found.siblings or ()}
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
            return self._snapshot(files.sizes, local_files_only=False)
        except Exception as error:
            if counter.raised is error:
                raise
            raise self._download_error(error) from error

    def cached(self, patterns: Sequence[str] = WANTED) -> Path:
        """Return the directory of an earlier download, or its file."""
        try:
            if self._model.file is None:
                return self._snapshot(patterns, local_files_only=True)
            directory = self._snapshot((), local_files_only=True)  # of any completeness: files are asked for alone
            names = {str(path.relative_to(directory)) for path in directory.rglob(f"*{GGUF}")}
            return directory / chosen_gguf(self._model, names)
        except Exception as error:
            reason = _first_line(self._unreachable or error)
            raise ModelError(
                f"The hub cannot be reached and {self._model} is not whole in the cache ({reason}).", hint=_ADVICE
            ) from (self._unreachable or error)

    def _snapshot(self, names: Collection[str], *, local_files_only: bool) -> Path:
        """Return the directory; with a network this also notes which commit the revision is."""
        from huggingface_hub import snapshot_download

        return Path(
            snapshot_download(
                self._model.repo,
                revision=self._model.revision,
                cache_dir=self._cache_dir,
                endpoint=self._endpoint,
                allow_patterns=list(names),
                ignore_patterns=None if self._model.file else ["*/*"],
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


def _is_wanted(name: str, patterns: Sequence[str] = WANTED) -> bool:
    return "/" not in name and any(fnmatchcase(name, pattern) for pattern in patterns)


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
