"""`headrace bench serve` from settings to result: model, calibration, warm-up, load, summary, files."""

from __future__ import annotations

import asyncio
import datetime
import random
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from engine.errors import ConfigError
from server.bench.serve_errors import BenchError, missing_extra
from server.bench.serve_records import RequestRecord, Slo, Summary, summarise
from server.bench.serve_workload import ConversationSource, WordCalibration, Workload, random_text
from server.version import VERSION

try:
    from server.bench.serve_client import LoadClient, Prompt, RequestOptions, base_url, connected
    from server.bench.serve_load import Load, LoadRun, OnRecord
except ModuleNotFoundError as error:
    if error.name != "aiohttp":
        raise
    raise missing_extra("aiohttp", "bench serve") from None

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PROBE_WORDS = (16, 144)


class ServeBench(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that decides on a run, but for the key, which is written nowhere. `warm_up` counts conversations."""

    url: str
    options: RequestOptions
    workload: Workload
    load: Load
    slo: Slo | None = None
    warm_up: int = 4
    timeout_s: float = 600.0
    reuse_connections: bool = True

    def check(self) -> None:
        """Raise ConfigError where settings do not go together."""
        load, workload = self.load, self.workload
        if (load.concurrency is None) == (load.rate is None):
            raise ConfigError("Give either --concurrency or --rate.")
        if load.requests is None and load.duration_s is None:
            raise ConfigError("Give --requests, --duration or both: something has to end the load.")
        if workload.token_ids is not None and self.options.endpoint != "completions":
            raise ConfigError("Token ids are prompts of text completions.", hint="Add --endpoint completions.")
        if workload.token_ids is not None and workload.turns > 1:
            raise ConfigError("--token-ids and --turns do not go together: answers come back as text.")


class ServeResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result file. `requests` has what the summary was computed from. A load that was `interrupted` has no records
    of the requests that were under way."""

    headrace: str
    started_at: str
    interrupted: bool = False
    settings: ServeBench
    calibration: WordCalibration | None
    summary: Summary
    requests: list[RequestRecord]


def run(
    bench: ServeBench,
    api_key: str | None = None,
    *,
    say: Callable[[str], None] = lambda text: None,
    on_record: OnRecord = lambda record: None,
) -> ServeResult:
    """Measure. `say` gets what the user should know before the load starts. Ctrl-C during the load ends it early, and
    what it has measured is returned; before any request has ended it is a KeyboardInterrupt."""
    bench.check()
    return asyncio.run(measure(bench, api_key, say=say, on_record=on_record))


async def measure(
    bench: ServeBench,
    api_key: str | None = None,
    *,
    say: Callable[[str], None] = lambda text: None,
    on_record: OnRecord = lambda record: None,
) -> ServeResult:
    """`run` in a loop of the caller's. Cancelling is its Ctrl-C."""
    bench = msgspec.structs.replace(bench, url=base_url(bench.url))
    async with connected(bench.url, api_key, bench.timeout_s, reuse=bench.reuse_connections) as client:
        if not bench.options.model:
            named = msgspec.structs.replace(bench.options, model=await client.first_model())
            bench = msgspec.structs.replace(bench, options=named)
        calibration = None
        if bench.workload.token_ids is None:
            calibration = await calibrate(client, bench)
            if calibration is None:
                say("The server counts no tokens in its answers: a word is taken for a token.")
        await _warm_up(client, bench, calibration)
        started_at = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        load, interrupted = _load_run(client, bench, calibration, bench.load, on_record=on_record), False
        try:
            await load.run()
        except asyncio.CancelledError:
            if not load.records:
                raise
            interrupted = True
    records = load.records
    if not records:
        raise BenchError("No request was due before the load ended.", hint="Make --duration longer.")
    return ServeResult(
        headrace=VERSION,
        started_at=started_at,
        interrupted=interrupted,
        settings=bench,
        calibration=calibration,
        summary=summarise(records, bench.slo),
        requests=records,
    )


async def calibrate(client: LoadClient, bench: ServeBench) -> WordCalibration | None:
    """Ask with two lengths, and see how many tokens the server makes of them; None where it does not tell."""
    counts: list[int] = []
    for words in PROBE_WORDS:
        text = random_text(random.Random(f"{bench.workload.seed}/probe/{words}"), words)
        is_chat = bench.options.endpoint == "chat"
        prompt: Prompt = [{"role": "user", "content": text}] if is_chat else text
        count = await client.prompt_tokens(bench.options, prompt)
        if count is None:
            return None
        counts.append(count)
    return WordCalibration.between(PROBE_WORDS, (counts[0], counts[1]))


async def _warm_up(client: LoadClient, bench: ServeBench, calibration: WordCalibration | None) -> None:
    """Hold conversations that are not measured. A server that answers none of them would answer no other."""
    if bench.warm_up == 0:
        return
    load = Load(concurrency=bench.warm_up, requests=bench.warm_up * bench.workload.turns)
    records = await _load_run(client, bench, calibration, load, warm_up=True).run()
    failures = [record for record in records if record.error is not None]
    if len(failures) == len(records):
        raise BenchError(f"Every request of the warm-up failed; the first with {_told(failures[0])}")


def _load_run(
    client: LoadClient,
    bench: ServeBench,
    calibration: WordCalibration | None,
    load: Load,
    *,
    warm_up: bool = False,
    on_record: OnRecord = lambda record: None,
) -> LoadRun:
    source = ConversationSource(bench.workload, calibration or WordCalibration(), warm_up=warm_up)
    turns, seed = bench.workload.turns, bench.workload.seed
    return LoadRun(client, bench.options, source, load, turns=turns, seed=seed, on_record=on_record)


def _told(record: RequestRecord) -> str:
    return f"{record.error}: {record.message}"


def write_result(result: ServeResult, path: Path) -> None:
    """Write JSON, indented but for the requests' many numbers."""
    whole = msgspec.to_builtins(result)
    requests = whole.pop("requests")
    head = msgspec.json.format(msgspec.json.encode(whole), indent=2).rstrip().removesuffix(b"}").rstrip()
    lines = b",\n    ".join(msgspec.json.encode(request) for request in requests)
    path.write_bytes(head + b',\n  "requests": [\n    ' + lines + b"\n  ]\n}\n")


def plotter() -> Callable[[ServeResult], Figure]:
    """Return the function that draws a result. Raises ConfigError without matplotlib, so ask before the load."""
    try:
        from server.bench.serve_plot import draw
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        raise missing_extra("matplotlib", "--plot") from None
    return draw
