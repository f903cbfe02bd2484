"""`headrace bench serve`: its options, and what it prints."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from server.cli.common import debug_option

if TYPE_CHECKING:
    from server.bench.serve_records import Slo

_POSITIVE = click.IntRange(min=1)
INTERRUPTED_CODE = 130
_SECONDS = click.FloatRange(min=0, min_open=True)


@click.command(short_help="A server, over HTTP: load, latencies, throughput.")
@click.option("--url", default="http://127.0.0.1:8000", envvar="HEADRACE_URL", help="[http://127.0.0.1:8000]")
@click.option("--api-key", envvar="HEADRACE_API_KEY", metavar="KEY", help="The key, better given as HEADRACE_API_KEY.")
@click.option("--model", metavar="NAME", help="The model to ask; the server's first unless given.")
@click.option("--endpoint", type=click.Choice(["chat", "completions"]), help="[chat; completions with --token-ids]")
@click.option("--concurrency", type=_POSITIVE, help="So many conversations at once. [8]")
@click.option("--rate", type=_SECONDS, metavar="R", help="Or so many start per second, as a Poisson process.")
@click.option("--requests", type=_POSITIVE, help="So many requests in all. [100 without --duration]")
@click.option("--duration", type=_SECONDS, metavar="S", help="Send for so many seconds.")
@click.option("--warm-up", type=click.IntRange(min=0), help="Conversations that come before. [as --concurrency, or 4]")
@click.option(
    "--prompt-tokens", default="512", metavar="DIST", help="512, uniform:LOW:HIGH, lognormal:MEDIAN:SIGMA[:MAX]."
)
@click.option("--output-tokens", default="128", metavar="DIST", help="The same for answers.")
@click.option("--shared-prefix-tokens", type=click.IntRange(min=0), default=0, help="Before every prompt. [0]")
@click.option("--shared-prefixes", type=_POSITIVE, default=1, help="How many different ones. [1]")
@click.option("--turns", type=_POSITIVE, default=1, help="Questions of a conversation. [1]")
@click.option("--think-time", type=click.FloatRange(min=0), default=0.0, metavar="S", help="Between its turns. [0]")
@click.option(
    "--token-ids",
    is_flag=False,
    flag_value="1000:30000",
    metavar="FIRST:END",
    help="Ask with random ids of this range. [1000:30000]",
)
@click.option("--seed", type=int, default=0, help="Prompts, lengths and times follow from it. [0]")
@click.option("--temperature", type=click.FloatRange(min=0), default=0.0, help="[0]")
@click.option("--stop-at-eos", is_flag=True, help="Do not send ignore_eos: answers may be shorter.")
@click.option("--no-usage", is_flag=True, help="Do not ask for usage: tokens are counted as chunks.")
@click.option("--extra-body", metavar="JSON", help="More fields of every request.")
@click.option("--slo-ttft", type=_SECONDS, metavar="MS", help="Goodput: the longest TTFT.")
@click.option("--slo-tpot", type=_SECONDS, metavar="MS", help="Goodput: the longest TPOT.")
@click.option("--fresh-connections", is_flag=True, help="Open a connection for each request.")
@click.option("--timeout", type=_SECONDS, default=600.0, metavar="S", help="The longest answer. [600]")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Write the result there, as JSON.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE.png", help="Draw it there.")
@debug_option
def serve(
    url: str,
    api_key: str | None,
    model: str | None,
    endpoint: str | None,
    concurrency: int | None,
    rate: float | None,
    requests: int | None,
    duration: float | None,
    warm_up: int | None,
    prompt_tokens: str,
    output_tokens: str,
    shared_prefix_tokens: int,
    shared_prefixes: int,
    turns: int,
    think_time: float,
    token_ids: str | None,
    seed: int,
    temperature: float,
    stop_at_eos: bool,
    no_usage: bool,
    extra_body: str | None,
    slo_ttft: float | None,
    slo_tpot: float | None,
    fresh_connections: bool,
    timeout: float,
    out: Path | None,
    plot: Path | None,
) -> None:
    """Send load to any OpenAI-compatible server and measure its answers.

    Either a number of conversations at once, or a rate that does not wait for answers: latencies then count from the
    time at which a request was due.
    """
    import msgspec
    from tqdm import tqdm

    from server.bench.serve_run import ServeBench, plotter, run, write_result
    from server.bench.serve_text import lines

    if concurrency is None and rate is None:
        concurrency = 8
    if requests is None and duration is None:
        requests = 100
    bench = msgspec.convert(
        {
            "url": url,
            "options": {
                "endpoint": endpoint or ("chat" if token_ids is None else "completions"),
                "model": model or "",
                "temperature": temperature,
                "ignore_eos": not stop_at_eos,
                "usage": not no_usage,
                "extra": _json_object(extra_body),
            },
            "workload": {
                "prompt": _lengths("--prompt-tokens", prompt_tokens),
                "output": _lengths("--output-tokens", output_tokens),
                "shared_prefix_tokens": shared_prefix_tokens,
                "shared_prefixes": shared_prefixes,
                "turns": turns,
                "token_ids": _id_range(token_ids),
                "seed": seed,
            },
            "load": {
                "concurrency": concurrency,
                "rate": rate,
                "requests": requests,
                "duration_s": duration,
                "think_s": think_time,
            },
            "slo": _slo(slo_ttft, slo_tpot),
            "warm_up": (concurrency or 4) if warm_up is None else warm_up,
            "timeout_s": timeout,
            "reuse_connections": not fresh_connections,
        },
        ServeBench,
    )
    for path in (out, plot):
        if path is not None and not path.parent.is_dir():
            raise click.UsageError(f"{path} cannot be written: there is no folder {path.parent}.")
    draw = None if plot is None else plotter()
    # On a terminal only.
    with tqdm(total=requests, unit="request", disable=None, leave=False) as bar:
        result = run(bench, api_key, say=lambda text: click.echo(text, err=True), on_record=lambda record: bar.update())
    if result.interrupted:
        click.echo(f"interrupted: these are the {result.summary.requests} requests that had ended.")
    click.echo("\n".join(lines(result.summary)))
    if out is not None:
        write_result(result, out)
    if plot is not None and draw is not None:
        draw(result).savefig(plot, dpi=120)
    if result.interrupted:
        raise click.exceptions.Exit(INTERRUPTED_CODE)
    if result.summary.completed == 0:
        raise click.exceptions.Exit(1)


def _lengths(option: str, text: str) -> object:
    from server.bench.serve_lengths import Lengths

    try:
        return Lengths.parse(text)
    except ValueError as error:
        raise click.UsageError(f"{option}: {error}") from None


def _slo(ttft_ms: float | None, tpot_ms: float | None) -> Slo | None:
    from server.bench.serve_records import Slo

    if ttft_ms is None and tpot_ms is None:
        return None
    return Slo(
        ttft_s=None if ttft_ms is None else ttft_ms / 1e3,
        tpot_s=None if tpot_ms is None else tpot_ms / 1e3,
    )


def _id_range(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    first, _, end = text.partition(":")
    if not (first.isdecimal() and end.isdecimal() and int(first) < int(end)):
        raise click.UsageError(f"--token-ids: {text!r} is no range of ids; write one like 1000:30000.")
    return int(first), int(end)


def _json_object(text: str | None) -> dict[str, object]:
    import msgspec

    try:
        return {} if text is None else msgspec.json.decode(text, type=dict[str, object])
    except ValueError:
        raise click.UsageError("--extra-body is not a JSON object.") from None
