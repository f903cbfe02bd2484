"""Every message of the wire, and its bounds. Knows no sockets.

A frame is one msgpack array: a tag, then the fields in order. Fields are only ever appended; what breaks an old peer
raises WIRE_VERSION, which `Hello` and `Welcome` carry first so that any two versions can tell each other apart.

    client (DEALER)                          engine (ROUTER)
    Hello ---------------------------------> Welcome, or VersionRefused
                                             Status: at once, and whenever it changes
    Submit, Finish, Abort -----------------> Outputs: one per step and peer, or Refused
    Credit: may send so many more Outputs
    WatchLoad: may send so many more ------> LoadReport: after a step, and when nothing happens
    Describe, FetchAsset, GetLoad, Drain --> InfoReply, AssetReply, LoadReply, DoneReply, or ErrorReply
    ResetPrefixCache, AbortRequests -------> DoneReply, CountReply, or ErrorReply
    OrderStore ----------------------------> StoreReply, maybe seconds later, or ErrorReply
"""

from __future__ import annotations

from typing import Literal

import msgspec

from engine.kv.store_orders import StoreAnswer, StoreOrder
from engine.protocol import EngineInfo, EngineLoad, GenerateRequest, TokenOutput
from engine.wire.errors import WireError

WIRE_VERSION = 2

MAX_CLIENT_FRAME_BYTES = 16 * 1024 * 1024
"""Of a frame to the engine. A prompt of a million ids is 5 MB."""

MAX_ENGINE_FRAME_BYTES = 64 * 1024 * 1024
"""Of a frame to a client. Prompt logprobs with many alternatives are the largest."""

ASSET_CHUNK_BYTES = 1024 * 1024

HEARTBEAT_INTERVAL_MS = 3_000
HEARTBEAT_TIMEOUT_MS = 15_000
"""At both ends. ZeroMQ's own threads answer heartbeats, so only a stopped process or a dead link is late."""

LOAD_REPORT_MIN_S = 0.01
"""Reports of steps that follow each other faster are one report."""

LOAD_REPORT_MAX_S = 0.1
"""An idle engine reports this often. One within a long step cannot: its next report comes when the step has ended."""

EngineState = Literal["loading", "ready", "draining", "failed"]


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """First message of a connection. `credit` is how many Outputs the engine may send before more is granted."""

    version: int
    credit: int


class Submit(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Run a request under the peer's own id, which is free again once its terminal output was sent. `sent_unix_s` is
    the peer's clock, which its deadline is in: two hosts' clocks differ. `prompt` is the request's prompt, which is
    empty in it, as u32 little-endian: reading a list of numbers takes many times as long."""

    request: GenerateRequest
    sent_unix_s: float | None = None
    prompt: bytes = b""


class Finish(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """`Engine.finish`: output tokens from `keep_tokens` on are overshoot."""

    request_id: str
    keep_tokens: int


class Abort(msgspec.Struct, frozen=True, array_like=True, tag=4):
    request_id: str


class Credit(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """The engine may send `count` more Outputs than it was allowed before."""

    count: int


class Describe(msgspec.Struct, frozen=True, array_like=True, tag=6):
    call_id: int


class FetchAsset(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """Ask for the asset's bytes from `offset` on; at most ASSET_CHUNK_BYTES come back."""

    call_id: int
    digest: str
    offset: int


class GetLoad(msgspec.Struct, frozen=True, array_like=True, tag=8):
    call_id: int


class Drain(msgspec.Struct, frozen=True, array_like=True, tag=9):
    call_id: int


class ResetPrefixCache(msgspec.Struct, frozen=True, array_like=True, tag=10):
    call_id: int


class AbortRequests(msgspec.Struct, frozen=True, array_like=True, tag=11):
    """End the requests of any peer that have this id, or this id and a dash at their id's beginning."""

    call_id: int
    request_id: str


class WatchLoad(msgspec.Struct, frozen=True, array_like=True, tag=12):
    """The engine may send `count` more LoadReports than it was allowed before. Who reads slowly gets newer ones, not
    more of them."""

    count: int


class OrderStore(msgspec.Struct, frozen=True, array_like=True, tag=13):
    """An operator's order to the KV store. An engine that tells of no tiers may be too old to know this message."""

    call_id: int
    order: StoreOrder


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag=32):
    """`incarnation` is drawn when the engine's process starts: another one means that every request is gone."""

    version: int
    incarnation: str


class VersionRefused(msgspec.Struct, frozen=True, array_like=True, tag=33):
    """The two ends cannot talk: the versions are those of the wire."""

    engine_version: int
    client_version: int


class Status(msgspec.Struct, frozen=True, array_like=True, tag=34):
    """`progress` of loading is in [0, 1]. `error` comes with "failed"."""

    state: EngineState
    progress: float = 0.0
    message: str = ""
    error: WireError | None = None


class Outputs(msgspec.Struct, frozen=True, array_like=True, tag=35):
    """What one step (or several, for a peer that was out of credit) produced; an attempt appears at most once."""

    batch: list[TokenOutput]


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=36):
    """The request was not taken. No output of this attempt follows."""

    request_id: str
    attempt: int
    error: WireError


class Bye(msgspec.Struct, frozen=True, array_like=True, tag=37):
    """The engine has forgotten this peer, or never met it: connect anew."""


class InfoReply(msgspec.Struct, frozen=True, array_like=True, tag=38):
    call_id: int
    info: EngineInfo


class AssetReply(msgspec.Struct, frozen=True, array_like=True, tag=39):
    """Part of an asset of `size_bytes` in all; `data` is empty behind its end."""

    call_id: int
    size_bytes: int
    data: bytes


class LoadReply(msgspec.Struct, frozen=True, array_like=True, tag=40):
    call_id: int
    load: EngineLoad


class DoneReply(msgspec.Struct, frozen=True, array_like=True, tag=41):
    call_id: int


class ErrorReply(msgspec.Struct, frozen=True, array_like=True, tag=42):
    call_id: int
    error: WireError


class CountReply(msgspec.Struct, frozen=True, array_like=True, tag=43):
    call_id: int
    count: int


class LoadReport(msgspec.Struct, frozen=True, array_like=True, tag=44):
    """`load` counts the first `submits` Submits of this peer's connection, and none behind them. `counters` are the
    host's own, of all its peers."""

    submits: int
    load: EngineLoad
    counters: dict[str, int] = {}


class StoreReply(msgspec.Struct, frozen=True, array_like=True, tag=45):
    call_id: int
    answer: StoreAnswer


Call = Describe | FetchAsset | GetLoad | Drain | ResetPrefixCache | AbortRequests | OrderStore
ClientMessage = Hello | Submit | Finish | Abort | Credit | WatchLoad | Call
Reply = InfoReply | AssetReply | LoadReply | DoneReply | ErrorReply | CountReply | StoreReply
EngineMessage = Welcome | VersionRefused | Status | Outputs | Refused | Bye | LoadReport | Reply
