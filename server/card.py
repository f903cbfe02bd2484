"""The start-up card: what was loaded, how much fits, and a request to copy. Made from EngineInfo alone."""

from __future__ import annotations

import json
import shlex
import sys
from typing import TextIO

from engine.protocol import EngineInfo, KVTierInfo
from server.version import VERSION


def print_card(
    info: EngineInfo, url: str, stream: TextIO | None = None, *, with_key: bool = False, replicas: int = 1
) -> None:
    """Write the card for a server that is ready at `url`. `stream` is stderr when None."""
    out = stream or sys.stderr
    out.write(card(info, url, with_key=with_key, replicas=replicas) + "\n")
    out.flush()


def card(info: EngineInfo, url: str, *, with_key: bool = False, replicas: int = 1) -> str:
    """The card's text. `with_key`: the server asks for keys, so the request to copy sends one. `info` is of one of the
    `replicas`, which are all alike."""
    base = url.rstrip("/")
    rows = [
        ("model", f"{info.model} ({info.architecture})"),
        *([("replicas", f"{replicas}, each with what follows")] if replicas > 1 else []),
        ("device", f"{info.device}, {_count(info.threads, 'thread')}" if info.device == "cpu" else info.device),
        ("dtype", info.dtype),
        ("numerics", info.numerics),
        ("operators", info.operators),
        ("window", _count(info.max_model_len, "token")),
        ("KV cache", _capacity(info)),
        *(("KV store" if number == 0 else "", describe_tier(tier)) for number, tier in enumerate(info.kv_tiers)),
        ("URL", base),
    ]
    width = max(len(name) for name, _ in rows)
    lines = [f"Headrace {VERSION} is ready.", ""]
    lines += [f"  {name:<{width}}  {value}" for name, value in rows]
    return "\n".join([*lines, "", _curl(info, base, with_key), ""])


def describe_tier(tier: KVTierInfo) -> str:
    """One tier of the KV store in a line."""
    parts = [f"{tier.tier}: {_size(tier.capacity_bytes)}"]
    if tier.place:
        parts.append(f"at {tier.place}")
    if tier.encrypted:
        parts.append("encrypted")
    if tier.is_direct is not None:
        parts.append("past the page cache (O_DIRECT)" if tier.is_direct else "through the page cache (no O_DIRECT)")
    if tier.answers is not None:
        parts.append("it answers" if tier.answers else "IT DOES NOT ANSWER, and is looked for every second")
    return ", ".join(parts)


def _size(size_bytes: int) -> str:
    if not size_bytes:
        return "capacity not known"
    return f"{size_bytes / 2**30:.1f} GiB" if size_bytes >= 2**30 else f"{size_bytes / 2**20:.0f} MiB"


def facts(info: EngineInfo, *, replicas: int = 1) -> dict[str, str | int]:
    """What the card tells, for a log that is read by machines."""
    return {
        "version": VERSION,
        "replicas": replicas,
        "architecture": info.architecture,
        "device": info.device,
        "threads": info.threads,
        "dtype": info.dtype,
        "kv_dtype": info.kv_dtype or info.dtype,
        "numerics": info.numerics,
        "operators": info.operators,
        "max_model_len": info.max_model_len,
        "kv_capacity_tokens": info.kv_capacity_tokens,
        "block_size": info.block_size,
        "kv_store": "; ".join(map(describe_tier, info.kv_tiers)),
    }


def _capacity(info: EngineInfo) -> str:
    """Tokens that fit, and how many requests of a full window that is."""
    at_once = info.kv_capacity_tokens / info.max_model_len
    blocks = f"blocks of {info.block_size}" + (f", {info.kv_dtype}" if info.kv_dtype else "")
    return f"{_count(info.kv_capacity_tokens, 'token')} in {blocks}: {at_once:.1f} requests at the full window"


def _curl(info: EngineInfo, base: str, with_key: bool) -> str:
    """A chat, or a completion where there is no chat template. One without an end token may have no text either."""
    body: dict[str, object] = {"model": info.model}
    if info.text.chat_template is not None:
        route, body["messages"] = "/v1/chat/completions", [{"role": "user", "content": "Say hello."}]
    else:
        route, body["prompt"] = "/v1/completions", "Once upon a time" if info.eos_ids else [1, 2, 3]
    data = shlex.quote(json.dumps(body))
    key = ' -H "Authorization: Bearer $HEADRACE_API_KEY"' if with_key else ""
    return f"  curl {base}{route}{key} -H 'Content-Type: application/json' \\\n    -d {data}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
