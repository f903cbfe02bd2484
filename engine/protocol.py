"""The token-level contract of the whole stack: everything that answers a request is an `Engine`.

Text is unknown below the server, so this module speaks token ids alone. It imports no torch, and every struct here is
what travels on the wire (msgpack). An async generator of `TokenOutput`s is one attempt of one request:

* offsets count output tokens, resumed ones included, so a late duplicate is recognised and dropped;
* exactly one output carries `finish_reason`, and it is the last;
* what fails raises an error of engine/errors.py instead (a `RequestError` before the first output, at the door).
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from typing import Annotated, Any, Literal, Protocol

import msgspec

from kvstore.keys import PUBLIC_SCOPE
from kvstore.manager.figures import StoreStats

FinishReason = Literal["stop", "length", "abort", "error"]
Numerics = Literal["default", "invariant"]
GroupKind = Literal["full", "sliding_window"]
KVTier = Literal["device", "ram", "disk", "remote"]

Count = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
Size = Annotated[int, msgspec.Meta(ge=1, lt=2**24)]
Seconds = Annotated[float, msgspec.Meta(ge=0, lt=1e12)]
"""Checked where they are decoded: whoever computes with them has numbers that can be."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How tokens are chosen. Checked at the door (engine/validation.py); below it every value is in range.

    temperature 0 is greedy. top_k 0 is off. `logprobs` None gives none, k >= 0 the chosen token's and k alternatives'.
    `seed` None is replaced by a drawn one at admission. `max_tokens` counts output tokens, resumed ones included.
    max_tokens 0 computes the prompt and samples nothing.
    `stop_token_ids` are the user's: `ignore_eos` switches off the model's end tokens only.

    presence and frequency penalties count output tokens, the repetition penalty the prompt's too; 0, 0 and 1 are off.
    `logit_bias` is added to logits by token id. `bad_words` are token sequences that the output must not contain.
    `allowed_token_ids` None allows every token. How they are put together stands in engine/sampler/edits.py.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    bad_words: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None

    @property
    def depends_on_prompt(self) -> bool:
        """Whether the choice of a token needs to know which tokens the prompt has, beyond their logits."""
        return self.repetition_penalty != 1.0

    @property
    def depends_on_outputs(self) -> bool:
        """Whether it needs to know the output so far."""
        penalised = self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0
        return penalised or any(len(word) > 1 for word in self.bad_words)


class Grammar(msgspec.Struct, frozen=True):
    """Source of a constraint on the output. Compiled matchers never travel; state is rebuilt by replay.

    `source` is a JSON schema's text, nothing (json_object), a regular expression, a grammar in Lark's notation or in
    GBNF, or a JSON list of texts.
    """

    kind: Literal["json_schema", "json_object", "regex", "grammar", "choice"]
    source: str = ""

    @classmethod
    def of_schema(cls, schema: Mapping[str, Any] | bool) -> Grammar:
        """JSON that is valid under a JSON schema."""
        return cls("json_schema", json.dumps(schema, ensure_ascii=False))

    @classmethod
    def of_choices(cls, choices: Sequence[str]) -> Grammar:
        """One of some texts."""
        return cls("choice", json.dumps(list(choices), ensure_ascii=False))


class KVTicket(msgspec.Struct, frozen=True, kw_only=True):
    """A claim on KV blocks that another engine holds for a request, valid for one generation of its lease."""

    address: str
    request_id: str
    generation: int
    tokens: int
    expires_unix_s: float


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One choice of one client request.

    `resume_ids` are output tokens that an earlier attempt emitted: they stay output tokens for positions, penalties,
    min/max tokens and offsets. `deadline_unix_s` is absolute, in seconds of the wall clock. Choices of one n > 1
    request share `group_id`. `cache_scope` (32 bytes) is the root of the request's block keys. Smaller `priority`
    runs first. `traceparent` and `tracestate` are W3C trace context. `session_id` names the conversation for routing;
    engines ignore it. Nothing of a request with `store_kv` false is kept beyond the device.
    """

    request_id: str
    prompt_ids: Sequence[int]
    sampling: SamplingParams = SamplingParams()
    attempt: int = 0
    group_id: str | None = None
    resume_ids: list[int] = []
    mode: Literal["full", "prefill_only"] = "full"
    grammar: Grammar | None = None
    kv_ticket: KVTicket | None = None
    cache_scope: bytes = PUBLIC_SCOPE
    priority: int = 0
    deadline_unix_s: float | None = None
    traceparent: str | None = None
    tracestate: str | None = None
    prompt_logprobs: int | None = None
    session_id: str | None = None
    store_kv: bool = True


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural-log probabilities of one token under the unmodified logits, best alternatives first.

    `rank` is the token's own among all of the vocabulary, 1 for the best; of equals the lower id is better.
    """

    logprob: float
    top_ids: list[int] = []
    top_logprobs: list[float] = []
    rank: int | None = None


class CachedTokens(msgspec.Struct, frozen=True, array_like=True):
    """Prompt tokens whose KV was not computed again, by the tier they came from."""

    device: Count = 0
    ram: Count = 0
    disk: Count = 0
    remote: Count = 0

    @property
    def total(self) -> int:
        return self.device + self.ram + self.disk + self.remote


class Timings(msgspec.Struct, frozen=True, array_like=True):
    """Seconds that one attempt spent waiting, until its first new token, and from there to its end."""

    queued_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0


class TokenOutput(msgspec.Struct, frozen=True, array_like=True):
    """New tokens of one request from one step (or from several, when the receiver was slow).

    `offset` is the output index of `token_ids[0]`. `logprobs` has one entry per token when they were asked for.
    `cached` and `prompt_logprobs` come with the first output only (`cached` with the last where an engine of another
    make tells it then); the first prompt token has no logprobs (None).
    `stop_token` is the end or stop token that ended the request: it is the last of `token_ids`, counts as an output
    token, and the text layer does not show it. `error` explains finish_reason "error" and "abort".
    """

    request_id: str
    attempt: int
    offset: Count
    token_ids: list[Count]
    finish_reason: FinishReason | None = None
    stop_token: int | None = None
    logprobs: list[TokenLogprobs] | None = None
    cached: CachedTokens | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    timings: Timings | None = None
    error: str | None = None
    error_code: str | None = None
    kv_ticket: KVTicket | None = None


class KVGroupSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Layers that share one block table. `window_tokens` is set for sliding_window only."""

    kind: GroupKind = "full"
    layers: tuple[int, ...] = ()
    kv_heads: int = 1
    head_dim: int = 1
    window_tokens: int | None = None


class AssetRef(msgspec.Struct, frozen=True):
    """A file that the engine serves by content: `digest` is the hex SHA-256 of its bytes."""

    digest: str
    size_bytes: int


class TextAssets(msgspec.Struct, frozen=True, kw_only=True):
    """What an API process needs to turn text into ids and back; fetched by digest, cached across engines.

    `tokenizer` is a tokenizer.json. `bos_id` is prepended to raw prompts (not to chat prompts, whose template does it)
    when `add_bos`. `chat_template` is the Jinja source.
    """

    tokenizer: AssetRef
    chat_template: AssetRef | None = None
    bos_id: int | None = None
    add_bos: bool = False
    special_tokens: dict[str, str] = {}


class KVTierInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A tier of the engine's KV store as it was opened. `place` is a directory or a server, without passwords.
    `is_direct` tells of a directory whether the page cache is passed by, `answers` of a server whether it does."""

    tier: KVTier
    capacity_bytes: int = 0
    place: str = ""
    encrypted: bool = False
    is_direct: bool | None = None
    answers: bool | None = None


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine is. Who may continue whose requests, router/registry/compat.py tells from it.

    `config_digest` is over what the model computes beside its weights: sizes, positions, norms, windows.
    `incarnation` is drawn anew whenever the engine's process starts. `numerics_fingerprint` names device, operators,
    dtype, mode and `arithmetic`, which is a digest of the code that computes, its libraries and its processor: tokens
    may differ between engines that differ in it. `generation_defaults` are the model's own sampling defaults by
    SamplingParams field name. `max_step_tokens` is the token budget of a step. `pid` is of the engine's process, 0
    where that means nothing. `kv_dtype` is empty where KV has the `dtype`. `kv_tiers` are those of its KV store.
    """

    model: str
    incarnation: str
    weights_digest: str
    architecture: str
    dtype: str
    device: str
    numerics: Numerics
    operators: str
    max_model_len: Size
    vocab_size: Size
    eos_ids: tuple[int, ...]
    block_size: Size
    kv_groups: tuple[KVGroupSpec, ...]
    kv_capacity_tokens: Count
    max_running: Size
    text: TextAssets
    generation_defaults: dict[str, float | int] = {}
    step_group: str | None = None
    threads: int = 1
    pid: Count = 0
    config_digest: str = ""
    max_step_tokens: Size = 1024
    arithmetic: str = ""
    kv_dtype: str = ""
    kv_tiers: tuple[KVTierInfo, ...] = ()

    @property
    def numerics_fingerprint(self) -> str:
        kv = f" with KV in {self.kv_dtype}" if self.kv_dtype else ""
        known = f"{self.device}/{self.operators}/{self.dtype}{kv}/{self.numerics}"
        return f"{known}/{self.arithmetic}" if self.arithmetic else known


class EngineLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine is doing now. Block counts are sums over KV groups; tokens are counted once per request.

    `queued_uncached_tokens` are still to be computed, beyond the one token that a request decodes in each step; what
    was cached when a request arrived is not among them. `running_context_tokens` are the tokens that decoding requests
    attend to, in all.

    `kv_store` is what the engine's KV store told about a second ago; sums over engines leave it out.

    Totals and busy times are cumulative, so that a rate is the quotient of differences. A step with prompt tokens
    counts as prefill; `decode_*` is of the steps without any: tokens sampled, tokens attended to, and time.
    """

    running: Count = 0
    waiting: Count = 0
    waiting_kv: Count = 0
    queued_uncached_tokens: Count = 0
    kv_blocks_used: Count = 0
    kv_blocks_total: Count = 0
    steps_total: Count = 0
    preemptions_total: Count = 0
    prompt_tokens_total: Count = 0
    cached_tokens_total: Count = 0
    output_tokens_total: Count = 0
    requests_total: dict[str, Count] = {}
    prefill_tokens_total: Count = 0
    prefill_busy_s_total: Seconds = 0.0
    draining: bool = False
    running_context_tokens: Count = 0
    decode_tokens_total: Count = 0
    decode_context_tokens_total: Count = 0
    decode_busy_s_total: Seconds = 0.0
    kv_store: StoreStats | None = None


class Engine(Protocol):
    """One replica, or anything that behaves like one. All methods are safe to call concurrently on one event loop."""

    def generate(self, request: GenerateRequest) -> AsyncIterator[TokenOutput]:
        """Yield the request's new tokens until one output carries `finish_reason`.

        Closing the iterator early aborts the request. Raises RequestError (bad request), PressureError (no room),
        EngineDiedError (resume elsewhere) or RequestFailedError (this request only).
        """
        ...

    async def finish(self, request_id: str, keep_tokens: int) -> None:
        """End a request as complete: the text layer found a stop string. Output tokens from `keep_tokens` on are
        overshoot and are kept out of usage and saved blocks. Unknown ids are ignored: the race with the end is normal.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """End a request because nobody waits for it. Unknown ids are ignored."""
        ...

    async def describe(self) -> EngineInfo:
        """Raise LoadingError until the engine can serve."""
        ...

    async def fetch_asset(self, digest: str) -> bytes:
        """Return the bytes of a text asset of `describe()`."""
        ...

    async def load(self) -> EngineLoad: ...

    async def drain(self) -> None:
        """Take nothing new (DrainingError) and let what runs finish."""
        ...


class Admin(Protocol):
    """What an operator may ask of an engine beyond `Engine`. It concerns the requests of all its clients."""

    async def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes. Running requests keep their blocks."""
        ...

    async def abort_requests(self, request_id: str) -> int:
        """End the request of this id and all whose ids begin with it and a dash (the choices of one client request).
        Return how many there were.
        """
        ...


class Target(Protocol):
    """One routable engine: (pool, worker, DP rank)."""

    @property
    def target_id(self) -> str: ...

    @property
    def engine(self) -> Engine: ...


Outcome = Literal["ok", "client_error", "pressure", "fault", "cancelled"]


class Lease(Protocol):
    """One request's claim on one target, released exactly once with how it went."""

    @property
    def target(self) -> Target: ...

    def first_output(self, output: TokenOutput) -> None:
        """The target has answered: its prompt is computed, and `output.cached` tells how much of it was not."""
        ...

    def release(self, outcome: Outcome) -> None: ...


class Pool(Protocol):
    """Targets that may serve the same requests."""

    async def choose(self, request: GenerateRequest, exclude: Collection[str]) -> Lease:
        """Wait for a ready target outside `exclude` (target ids) and lease it.

        Raises PressureError when the pool is full and DeadlineError when the request's deadline passes first.
        """
        ...


class LoadPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks that a KVPort can supply for a request: `keys` follow on the device's own prefix of `start_block`, and
    `tiers` tells where each of them is now."""

    request_id: str
    start_block: int
    keys: tuple[bytes, ...]
    tiers: tuple[KVTier, ...]


class LoadDone(msgspec.Struct, frozen=True, kw_only=True):
    """End of a load. The first `loaded_blocks` of the plan hold correct KV; `error` says why the rest do not."""

    request_id: str
    loaded_blocks: int
    error: str | None = None


class HoldDone(msgspec.Struct, frozen=True, kw_only=True):
    """The port needs a finished request's blocks no longer."""

    request_id: str


class FullBlock(msgspec.Struct, frozen=True, kw_only=True):
    """A published block: immutable from now on. `index` is its place in the sequence; `block_ids` has one id per KV
    group (0 where the group has none)."""

    request_id: str
    index: int
    key: bytes
    parent: bytes
    token_ids: tuple[int, ...]
    block_ids: tuple[int, ...]


class KVPort(Protocol):
    """How store and transfer plug into the engine, which imports neither. Called by the scheduler, in its thread.

    Ownership: blocks handed to `start_load` belong to the port until `poll` reports its LoadDone, also when the
    request is aborted meanwhile. Blocks of a request that `on_finish` answers with "hold" belong to the port until
    `poll` reports its HoldDone. Nothing here blocks; a port that fails reports it through `poll` and never raises.
    """

    def look_up(
        self, request_id: str, scope: bytes, keys: Sequence[bytes], start_block: int, *, save: bool = True
    ) -> None:
        """A request begins to wait, and may be matched from now on; the device holds its first `start_block` keys. With
        `save` false nothing of it is to be kept."""
        ...

    def match(self, request_id: str, keys: Sequence[bytes], start_block: int) -> LoadPlan | Literal["later"] | None:
        """Return what can be loaded after the first `start_block` keys, which the device holds, or None for nothing.

        "later" is for what is not known yet: the request waits, and others may go before it. That ends within a
        fraction of a second, whatever the port asks.
        """
        ...

    def start_load(self, plan: LoadPlan, block_ids: Sequence[Sequence[int]]) -> None:
        """Fill `block_ids[group][i]` with the block of `plan.keys[i]`."""
        ...

    def poll(self) -> Sequence[LoadDone | HoldDone]: ...

    def on_full(self, blocks: Sequence[FullBlock]) -> None:
        """Blocks were published. The port may read them while their request runs or is held, except for those of a
        sliding window: they are reused once the window has passed them, so they are read in here or not at all.
        """
        ...

    def on_finish(self, request_id: str, keep_tokens: int) -> Literal["free", "hold"]:
        """The request gives up its blocks; its first `keep_tokens` tokens (prompt and output) are worth saving. It has
        ended, or was preempted and will be matched anew.
        """
        ...

    def observe_prefill(self, tokens: int, seconds: float) -> None:
        """So many prompt tokens took so long: what a load has to beat."""
        ...

    def layer_done(self, step: int, layer: int) -> None:
        """The step's KV of this layer is written."""
        ...
