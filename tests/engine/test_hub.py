"""Models from a hub: what is fetched, resumed, found without a network, and what is said when it cannot be had."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.errors import ModelError
from engine.loader import hub as hub_source
from engine.loader.hub import HubModel, fetch, parse
from engine.loader.sources import find_model
from tests.support.gguf_files import write_gguf
from tests.support.hub_server import Hub, hub_server
from tests.support.loading import load
from tests.support.tiny_models import write_tiny

REPO = "org/tiny-qwen3"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_tiny(tmp_path_factory.mktemp("repo"), "Qwen3ForCausalLM", shard_size="200KB", head_dim=16)
    (directory / "consolidated.safetensors").write_bytes(b"the same weights once more")
    (directory / "pytorch_model.bin").write_bytes(b"and again")
    (directory / "README.md").write_text("a model")
    return directory


@pytest.fixture
def hub(files: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with hub_server() as server:
        server.add(REPO, files)
        server.repos[REPO] = dict(sorted(server.repos[REPO].items()))
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield server


class Progress:
    def __init__(self) -> None:
        self.steps: list[tuple[int, int]] = []

    def __call__(self, done: int, total: int) -> None:
        self.steps.append((done, total))

    def check_complete(self, size: int) -> None:
        done = [done for done, _ in self.steps]
        assert done == sorted(done)
        assert self.steps[-1] == (size, size)
        assert {total for _, total in self.steps} == {size}


def wanted_bytes(server: Hub) -> int:
    return sum(len(content) for name, content in server.repos[REPO].items() if hub_source._is_wanted(name))


def test_weights_configuration_and_tokenizer_are_fetched_and_nothing_else(
    hub: Hub, files: Path, tmp_path: Path
) -> None:
    progress = Progress()
    directory = fetch(HubModel(REPO), progress, tmp_path)
    names = {path.name for path in directory.iterdir()}
    assert {"config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors.index.json"} <= names
    assert len([name for name in names if name.endswith(".safetensors")]) > 1
    assert not names & {"consolidated.safetensors", "pytorch_model.bin", "README.md"}
    progress.check_complete(wanted_bytes(hub))
    assert len(progress.steps) > len(names)
    assert load(directory).weights_digest == load(files).weights_digest


def test_a_second_fetch_transfers_nothing(hub: Hub, tmp_path: Path) -> None:
    first = fetch(HubModel(REPO), Progress(), tmp_path)
    hub.sent.clear()
    progress = Progress()
    assert fetch(HubModel(REPO), progress, tmp_path) == first
    assert hub.sent == []
    progress.check_complete(wanted_bytes(hub))


def test_a_new_commit_is_fetched_and_the_old_one_stays_for_who_names_it(hub: Hub, tmp_path: Path) -> None:
    first = fetch(HubModel(REPO), Progress(), tmp_path)
    old = hub.commit(REPO)
    hub.repos[REPO]["generation_config.json"] = b'{"temperature": 0.25}'
    hub.sent.clear()
    second = fetch(HubModel(REPO), Progress(), tmp_path)
    assert second != first
    assert [name for name, _ in hub.sent] == ["generation_config.json"]
    hub.broken = True
    assert fetch(HubModel(REPO, old), Progress(), tmp_path) == first


def test_a_connection_that_drops_is_taken_up_again(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chunk = 1 << 14  # the library keeps whole chunks, of 10 MiB usually
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", chunk)
    hub.cut_after = cut_after = 5 * chunk + 1
    progress = Progress()
    directory = fetch(HubModel(REPO), progress, tmp_path)
    cut = next(name for name, size in hub.sent if size == cut_after)
    assert (cut, len(hub.repos[REPO][cut]) - 5 * chunk) in hub.sent
    assert (directory / cut).read_bytes() == hub.repos[REPO][cut]
    progress.check_complete(wanted_bytes(hub))


def test_a_download_that_broke_off_says_so_and_the_next_one_keeps_what_is_whole(hub: Hub, tmp_path: Path) -> None:
    hub.cut_after, hub.dies_with_cut = 1 << 15, True
    with pytest.raises(ModelError, match=f"The download of {REPO} broke off") as caught:
        fetch(HubModel(REPO), Progress(), tmp_path)
    assert "fetches the rest" in str(caught.value.hint)
    whole = {name for name, size in hub.sent if size == len(hub.repos[REPO][name])}
    assert whole
    hub.broken = False
    hub.sent.clear()
    progress = Progress()
    fetch(HubModel(REPO), progress, tmp_path)
    assert not whole & {name for name, _ in hub.sent}
    progress.check_complete(wanted_bytes(hub))


def test_a_fetched_model_needs_no_hub(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = fetch(HubModel(REPO), Progress(), tmp_path)
    hub.broken = True
    assert fetch(HubModel(REPO), Progress(), tmp_path) == directory
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody listens to the discard port
    assert fetch(HubModel(REPO), Progress(), tmp_path) == directory


def test_without_a_hub_a_model_that_is_not_whole_is_refused(hub: Hub, tmp_path: Path) -> None:
    hub.broken = True
    with pytest.raises(ModelError, match=f"cannot be reached and {REPO} is not whole in the cache") as caught:
        fetch(HubModel(REPO), Progress(), tmp_path)
    assert "network" in str(caught.value.hint)


REFUSALS = {
    "unknown": (HubModel("org/nothing"), {}, "has no repository org/nothing", "HF_TOKEN"),
    "private": (HubModel("org/secret"), {"org/secret": (401, "RepoNotFound")}, "has no repository", "HF_TOKEN"),
    "gated": (HubModel("org/gated"), {"org/gated": (403, "GatedRepo")}, "org/gated is gated", "HF_TOKEN"),
    "forbidden": (HubModel("org/closed"), {"org/closed": (403, "")}, "refuses org/closed (403)", "HF_TOKEN"),
    "revision": (HubModel(REPO, "v9"), {}, "has no revision 'v9'", None),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_refusal_is_told_in_one_line(hub: Hub, tmp_path: Path, case: str) -> None:
    model, refuse, message, hint = REFUSALS[case]
    hub.refuse.update(refuse)
    with pytest.raises(ModelError) as caught:
        fetch(model, Progress(), tmp_path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    if hint is not None:
        assert hint in str(caught.value.hint)


def test_a_repository_without_safetensors_is_refused(hub: Hub, tmp_path: Path) -> None:
    hub.repos["org/bins"] = {"config.json": b"{}", "pytorch_model.bin": b"x"}
    with pytest.raises(ModelError, match=r"org/bins has no model\*\.safetensors files"):
        fetch(HubModel("org/bins"), Progress(), tmp_path)
    assert hub.sent == []


GGUF_REPO = "org/tiny-GGUF"


@pytest.fixture(scope="module")
def gguf_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    path = tmp_path_factory.mktemp("gguf") / "a.gguf"
    write_gguf(write_tiny(path.parent / "hf", "Qwen3ForCausalLM", head_dim=16), path, "qwen3")
    whole = path.read_bytes()
    return {
        "README.md": b"a model",
        "config.json": b"{}",
        "tiny-Q8_0.gguf": whole,
        "tiny-f16.gguf": b"GGUF of another kind",
        "mmproj-tiny-f16.gguf": b"GGUF of a projector",
        "deep/tiny-Q4_K_M.gguf": b"GGUF in a folder",
        "deep/tiny-UD-Q4_K_M.gguf": b"GGUF in a folder, by other means",
        "tiny-Q6_K-00001-of-00002.gguf": b"GGUF in parts",
        "tiny-Q6_K-00002-of-00002.gguf": b"the other part",
    }


@pytest.mark.parametrize("name", ["Q8_0", "q8_0", "tiny-Q8_0.gguf"])
def test_a_gguf_file_of_a_repository_is_fetched_by_its_kind_or_name(
    hub: Hub, gguf_files: dict[str, bytes], tmp_path: Path, name: str
) -> None:
    hub.repos[GGUF_REPO] = gguf_files
    progress = Progress()
    path = fetch(HubModel(GGUF_REPO, file=name), progress, tmp_path)
    assert path.name == "tiny-Q8_0.gguf"
    assert [file for file, _ in hub.sent] == [path.name]
    progress.check_complete(len(gguf_files[path.name]))
    assert load(path).architecture == "Qwen3ForCausalLM"
    hub.broken = True
    assert fetch(HubModel(GGUF_REPO, file=name), Progress(), tmp_path) == path
    with pytest.raises(ModelError, match="not whole in the cache"):
        fetch(HubModel(GGUF_REPO, file="f16"), Progress(), tmp_path)


def test_a_gguf_file_in_a_folder_is_named_like_any_other(
    hub: Hub, gguf_files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repos[GGUF_REPO] = gguf_files
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    path = find_model(f"{GGUF_REPO}/deep/tiny-Q4_K_M.gguf", Progress()).path
    assert path.read_bytes() == gguf_files["deep/tiny-Q4_K_M.gguf"]
    assert find_model(f"{GGUF_REPO}:f16", Progress()).path.read_bytes() == gguf_files["tiny-f16.gguf"]


@pytest.mark.parametrize(
    ("file", "message", "hint"),
    [
        (None, "has GGUF files only", f"Name one, such as {GGUF_REPO}:"),
        ("Q4_K_M", "more than one GGUF file for 'Q4_K_M'", "It has: deep/tiny-Q4_K_M.gguf, deep/tiny-UD-Q4_K_M.gguf."),
        ("Q2_K", "no GGUF file 'Q2_K'", "tiny-Q8_0.gguf, tiny-f16.gguf"),
        ("Q6_K", "no GGUF file 'Q6_K'", "several parts"),
        ("config.json", "no GGUF file 'config.json'", "tiny-Q8_0.gguf"),
        ("8_0", "no GGUF file '8_0'", "tiny-Q8_0.gguf"),
    ],
)
def test_a_gguf_file_that_is_not_named_well_is_told_with_what_there_is(
    hub: Hub, gguf_files: dict[str, bytes], tmp_path: Path, file: str | None, message: str, hint: str
) -> None:
    hub.repos[GGUF_REPO] = gguf_files
    with pytest.raises(ModelError, match=message) as caught:
        fetch(HubModel(GGUF_REPO, file=file), Progress(), tmp_path)
    assert hint in str(caught.value.hint)
    assert hub.sent == []


def test_what_progress_raises_gives_the_download_up(hub: Hub, tmp_path: Path) -> None:
    def give_up(done: int, total: int) -> None:
        raise InterruptedError("enough")

    with pytest.raises(InterruptedError, match="enough"):
        fetch(HubModel(REPO), give_up, tmp_path)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("org/name", HubModel("org/name")),
        ("Qwen/Qwen3-0.6B@v1.0/rc", HubModel("Qwen/Qwen3-0.6B", "v1.0/rc")),
        ("name", None),
        ("/org/name", None),
        ("org/name/", None),
        ("org/name/more", None),
        ("./org", None),
        ("../name", None),
        ("org/name@", None),
        ("org/name:Q4_K_M", HubModel("org/name", file="Q4_K_M")),
        ("org/name@v1:sub/a-Q4_K_M.gguf", HubModel("org/name", "v1", "sub/a-Q4_K_M.gguf")),
        ("org/name/a.gguf", HubModel("org/name", file="a.gguf")),
        ("org/name/sub/a.gguf", HubModel("org/name", file="sub/a.gguf")),
        ("models/a.gguf", None),
        ("org/name:", None),
        ("org/name:/etc/a.gguf", None),
    ],
)
def test_hub_ids_are_told_from_paths(name: str, expected: HubModel | None) -> None:
    assert parse(name) == expected


def test_a_directory_of_that_name_wins(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "tiny-qwen3").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert find_model(REPO, Progress()).path == Path(REPO)


def test_pull_brings_a_hubs_model_into_the_hubs_cache(hub: Hub, tmp_path: Path) -> None:
    environment = {**os.environ, "HF_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "server", "pull", REPO]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    directory = Path(done.stdout.strip())
    assert directory.is_relative_to(tmp_path / "hub")
    assert (directory / "config.json").read_bytes() == hub.repos[REPO]["config.json"]
    assert f"Fetching {REPO}" in done.stderr
    missing = subprocess.run([*command[:-1], "org/none"], env=environment, capture_output=True, text=True, check=False)
    assert missing.returncode == 2
    assert missing.stderr.startswith("error: The hub has no repository org/none")
