"""Loads a model: finds its files, builds the module in the wanted dtype, fills it tensor by tensor, hashes on the way.

Peak memory is the module plus one tensor. Knows no KV cache and no scheduler.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

from engine.attention.base import AttentionBackend, FusedAttention
from engine.attention.registry import choose
from engine.config import EngineConfig
from engine.cpu_ops.library import Library, library_or_none, load_library
from engine.cpu_ops.packing import ELEMENT_TYPES
from engine.errors import ConfigError, ModelError, RequestError
from engine.layers.fp8 import FP8, WeightPart
from engine.layers.row_ops import RowOps, check_row_independence, computes_fp8, row_ops
from engine.loader.arithmetic import arithmetic_digest
from engine.loader.checkpoint import Checkpoint, TextFiles
from engine.loader.gguf_checkpoint import GGUFCheckpoint
from engine.loader.precheck import check_gguf_magic, check_window
from engine.loader.random_shapes import RANDOM_PREFIX
from engine.loader.random_weights import RandomCheckpoint
from engine.loader.safetensors import SafetensorsCheckpoint
from engine.loader.sources import find_model
from engine.loader.template_file import template_source
from engine.loader.text_only import text_assets
from engine.models.base import Model
from engine.models.llama import Llama
from engine.models.llama_jobs import LlamaInJobs
from engine.models.registry import MODELS
from engine.protocol import KVGroupSpec, TextAssets
from engine.text.chat import ChatTemplate
from engine.text.tokenizer import TextCodec
from kvstore.namespace import canonical

OnProgress = Callable[[float, str], None]
"""Called with (fraction in [0, 1], phase) between tensors. It may raise to give up the load."""

CheckRoom = Callable[[tuple[KVGroupSpec, ...], torch.dtype, int], object]
"""Called with a model's KV groups, its dtype and the longest sequence. Raises when there will be no room for them."""

OnText = Callable[[TextCodec, int, tuple[int, ...]], object]
"""Called with the model's text, the size of its vocabulary and its end ids before its weights are read: what needs no
more than these can be made meanwhile."""

OnBuilt = Callable[[Llama, int], object]
"""Called with the module on its device, before its weights are read into it, and the longest sequence."""

SAMPLE_TEXT = "Hello, w\u00f6rld 1\n"
"""A tokenizer that cannot read this reads next to nothing."""

_DTYPES = {
    "auto": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model ready to run. `assets` are the text files by hex SHA-256; `weights_digest` is over the stored bytes.

    With `ignores_unwritten_kv` a slot of the cache that no token has written never touches a result.
    """

    module: Model
    backend: AttentionBackend
    kv_groups: tuple[KVGroupSpec, ...]
    eos_ids: tuple[int, ...]
    max_model_len: int
    vocab_size: int
    weights_digest: str
    config_digest: str
    arithmetic: str
    architecture: str
    dtype: torch.dtype
    kv_dtype: torch.dtype
    device: torch.device
    operators: str
    ignores_unwritten_kv: bool
    generation_defaults: dict[str, float | int]
    text: TextAssets
    assets: dict[str, bytes]


def load_model(
    config: EngineConfig,
    on_progress: OnProgress,
    *,
    check_room: CheckRoom = lambda groups, dtype, max_model_len: None,
    on_text: OnText = lambda codec, vocab_size, eos_ids: None,
    on_built: OnBuilt = lambda module, max_model_len: None,
) -> LoadedModel:
    """Load `config.model` onto `config.device`. Raises ModelError or ConfigError with one line for the user, and what
    `check_room` raises before memory is taken."""
    device, dtype = choose_device(config.device), _DTYPES[config.dtype]
    backend, ops = choose(device, config.numerics), row_ops(config.numerics, device, config.weights)
    library = _cpp_operators(config, device, dtype)
    kv_dtype = FP8 if config.kv_dtype == "fp8" else dtype
    on_progress(0.0, "opening model files")
    checkpoint = open_checkpoint(config.model, on_progress, device)
    try:
        max_model_len = check_window(config.max_model_len, checkpoint.config.max_positions, checkpoint.path)

        def build(device: torch.device, max_positions: int) -> Llama:
            return MODELS[checkpoint.architecture](
                checkpoint.config, ops=ops, backend=backend, max_positions=max_positions, dtype=dtype, device=device
            )

        # Without memory first: what a file claims of itself may be anything.
        outline = _built(lambda: build(torch.device("meta"), 1), checkpoint)
        _check_tensors(outline, checkpoint)
        check_room(outline.kv_groups(), kv_dtype, max_model_len)
        codec, text, assets = _text_assets(checkpoint, config.chat_template)
        # An end token that the model has no logit for is never chosen.
        eos_ids = tuple(token for token in checkpoint.eos_ids if 0 <= token < checkpoint.config.vocab_size)
        on_text(codec, checkpoint.config.vocab_size, eos_ids)
        module = _built(lambda: build(device, max_model_len), checkpoint)
        on_built(module, max_model_len)
        weights_digest = _fill(module, checkpoint, on_progress)
    finally:
        checkpoint.close()
    on_progress(1.0, "packing weights")
    ready = _pack(module, library, ops, config)
    return LoadedModel(
        module=ready,
        backend=backend,
        kv_groups=module.kv_groups(),
        eos_ids=eos_ids,
        max_model_len=max_model_len,
        vocab_size=checkpoint.config.vocab_size,
        weights_digest=weights_digest,
        config_digest=hashlib.sha256(canonical(asdict(checkpoint.config)).encode()).hexdigest(),
        arithmetic=arithmetic_digest(device),
        architecture=checkpoint.architecture,
        dtype=dtype,
        kv_dtype=kv_dtype,
        device=device,
        operators=(backend.name if library is None else library.operators)
        + ("" if config.weights == "dtype" else f"_{config.weights}"),
        ignores_unwritten_kv=library is not None or isinstance(backend, FusedAttention),
        generation_defaults=checkpoint.generation_defaults,
        text=text,
        assets=assets,
    )


def _cpp_operators(config: EngineConfig, device: torch.device, dtype: torch.dtype) -> Library | None:
    """Return the C++ operators, or None for those of torch or of the GPU. Raises ConfigError where they are a must."""
    if "fp8" in (config.weights, config.kv_dtype):
        _check_fp8(config, device, dtype)
        return None
    serve = device.type == "cpu" and dtype in ELEMENT_TYPES
    wanted = config.operators
    if config.weights == "int8" and wanted == "torch":
        raise ConfigError("weights 'int8' need the operators 'cpp'", hint="Use --operators auto.")
    if wanted == "cpp" or config.weights == "int8":
        if not serve:
            setting = "operators 'cpp'" if wanted == "cpp" else "weights 'int8'"
            raise ConfigError(
                f"{setting} are not available for device '{device.type}' with dtype '{str(dtype)[6:]}'",
                hint="Use --device cpu with --dtype bfloat16 or float32, or the default.",
            )
        return load_library()
    return library_or_none() if serve and wanted == "auto" else None


def _check_fp8(config: EngineConfig, device: torch.device, dtype: torch.dtype) -> None:
    """Raise ConfigError for what weights or KV of fp8 cannot go with."""
    setting = "weights 'fp8'" if config.weights == "fp8" else "kv_dtype 'fp8'"
    if config.operators == "cpp" or config.weights == "int8":
        other = "operators 'cpp'" if config.operators == "cpp" else "weights 'int8'"
        raise ConfigError(f"{setting} cannot go with {other}", hint="Leave one of the two out.")
    if config.weights == "fp8" and device.type == "cuda" and dtype != torch.bfloat16:
        raise ConfigError(
            f"weights 'fp8' are not available for device 'cuda' with dtype '{str(dtype)[6:]}'",
            hint="Use --dtype bfloat16, or the default.",
        )
    if config.kv_dtype == "fp8" and device.type == "cuda" and not computes_fp8(device):
        raise ConfigError(
            "kv_dtype 'fp8' needs a GPU of compute capability 8.9 or more", hint="Use --kv-dtype dtype, or the default."
        )


def _pack(module: Llama, library: Library | None, ops: RowOps, config: EngineConfig) -> Model:
    """Give the weights the layout that products read fastest. Raises ConfigError when a product of the invariant mode
    is not."""
    if library is None:
        module.pack()
        if config.numerics == "invariant":
            check_row_independence(ops, [p for p in module.parameters() if p.dim() == 2], module.embedding.dtype)
        return module
    in_jobs = LlamaInJobs(module, library, torch.get_num_threads(), int8=config.weights == "int8")
    if config.numerics == "invariant":
        in_jobs.check_row_independence()
    return in_jobs


def choose_device(name: str) -> torch.device:
    """Return the device of a setting: "auto" is CUDA where there is one. Raises ConfigError when it is not here."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device 'cuda' is not available here", hint="Use --device cpu, or install torch with CUDA.")
    return torch.device(name)


def open_checkpoint(
    model: str, on_progress: OnProgress | None = None, device: torch.device | None = None
) -> Checkpoint:
    """Open a model from any source; one that is not here yet is fetched. Random weights are made on `device`."""
    if model.startswith(RANDOM_PREFIX):
        return RandomCheckpoint(model.removeprefix(RANDOM_PREFIX), device or torch.device("cpu"))
    fetching = f"fetching {model}"
    told = on_progress or (lambda progress, message: None)
    found = find_model(model, lambda done, total: told(done / total, fetching))
    path = found.path
    if path.is_dir():
        return SafetensorsCheckpoint(path)
    check_gguf_magic(path)
    return GGUFCheckpoint(path, found.generation_defaults)


def _built(build: Callable[[], Llama], checkpoint: Checkpoint) -> Llama:
    try:
        return build()
    except (RuntimeError, MemoryError, ArithmeticError, ValueError) as error:
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise ModelError(
            f"{checkpoint.path}: the model cannot be built: {reason}",
            hint="If it is memory that lacks, try --max-model-len or another --dtype.",
        ) from error


def _text_assets(checkpoint: Checkpoint, chat_template: str | None) -> tuple[TextCodec, TextAssets, dict[str, bytes]]:
    files, vocab_size = checkpoint.text, checkpoint.config.vocab_size
    if files.bos_id is not None and not 0 <= files.bos_id < vocab_size:
        raise ModelError(f"{checkpoint.path}: the BOS token {files.bos_id} is outside the vocabulary [0, {vocab_size})")
    template = files.chat_template if chat_template is None else template_source(chat_template)
    return _checked_codec(files, template, checkpoint), *text_assets(files, template)


def _checked_codec(files: TextFiles, template: bytes | None, checkpoint: Checkpoint) -> TextCodec:
    """Text is made in other processes; but what they could not use is told here, where a wrong model ends the start."""
    bos_id = files.bos_id if files.add_bos else None
    try:
        codec = TextCodec(files.tokenizer, bos_id=bos_id, vocab_size=checkpoint.config.vocab_size)
        codec.encode(SAMPLE_TEXT, parse_special=True)
        if template is not None:
            ChatTemplate(template.decode(), files.special_tokens)
        return codec
    except RequestError as error:
        raise ModelError(f"{checkpoint.path}: {error}") from error
    except ModelError as error:
        raise ModelError(f"{checkpoint.path}: {error}", hint=error.hint) from error


def _fill(module: Model, checkpoint: Checkpoint, on_progress: OnProgress) -> str:
    """Copy every tensor into the module; return the hex SHA-256 over names and stored bytes, in the module's order."""
    parts = list(module.named_parts())
    digest = hashlib.sha256()
    for index, (name, target) in enumerate(parts):
        on_progress(index / len(parts), "reading weights")
        digest.update(name.encode() + b"\0")
        target.copy_(checkpoint.read(name, digest))
    on_progress(1.0, "reading weights")
    return digest.hexdigest()


def _check_tensors(module: Model, checkpoint: Checkpoint) -> None:
    """Compare names and shapes of what the module needs and the files have."""
    parts = list(module.named_parts())
    _check_names([name for name, _ in parts], checkpoint)
    for name, target in parts:
        _check_shape(name, checkpoint.shape(name), target, checkpoint)


def _check_names(wanted: list[str], checkpoint: Checkpoint) -> None:
    missing = [name for name in wanted if name not in checkpoint.tensor_names]
    if missing:
        raise ModelError(f"{checkpoint.path}: {len(missing)} tensors are missing, the first is {missing[0]!r}")
    known = {*wanted, "lm_head.weight"}  # a tied head is stored by some tools and never read
    unused = [name for name in checkpoint.tensor_names if name not in known and "rotary_emb" not in name]
    if unused:
        raise ModelError(
            f"{checkpoint.path}: {len(unused)} tensors do not belong to {checkpoint.architecture},"
            f" the first is {min(unused)!r}"
        )


def _check_shape(name: str, stored: tuple[int, ...], target: WeightPart, checkpoint: Checkpoint) -> None:
    if stored != tuple(target.shape):
        raise ModelError(
            f"{checkpoint.path}: tensor {name!r} has shape {list(stored)}, the model needs {list(target.shape)}"
        )
