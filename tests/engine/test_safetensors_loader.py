"""Hugging Face directories: what is read from where, and one clear error for whatever can be wrong with them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config import EngineConfig
from engine.errors import ConfigError, ModelError
from engine.loader.load import LoadedModel, load_model
from engine.loader.safetensors import SafetensorsCheckpoint
from engine.runner.build import build_engine
from tests.support.loading import load
from tests.support.tiny_models import CHAT_TEMPLATE, write_json, write_tiny_llama


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def model(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "model"))


def change(path: Path, **values: object) -> None:
    """Set keys of a JSON file; None removes one."""
    content = json.loads(path.read_text()) if path.exists() else {}
    content |= values
    write_json(path, {key: value for key, value in content.items() if value is not None})


def change_weights(model: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    weights = load_file(model / "model.safetensors")
    edit(weights)
    save_file(weights, model / "model.safetensors", {"format": "pt"})


def template_of(loaded: LoadedModel) -> str:
    assert loaded.text.chat_template is not None
    return loaded.assets[loaded.text.chat_template.digest].decode()


def test_text_assets_end_tokens_and_defaults_come_from_their_files(model: Path) -> None:
    loaded = load(model)
    assert loaded.architecture == "LlamaForCausalLM"
    assert loaded.eos_ids == (2, 3)  # config: 2, generation config: 2 and 3, tokenizer: <|end|> = 3
    assert loaded.generation_defaults == {"temperature": 0.7, "top_k": 20}
    assert loaded.text.special_tokens == {"bos_token": "<s>", "eos_token": "<|end|>", "unk_token": "<unk>"}
    assert (loaded.text.bos_id, loaded.text.add_bos) == (1, False)
    assert template_of(loaded) == CHAT_TEMPLATE
    assert loaded.assets[loaded.text.tokenizer.digest] == (model / "tokenizer.json").read_bytes()


def test_a_template_file_wins_over_the_tokenizer_configs(model: Path) -> None:
    (model / "chat_template.jinja").write_text("{{ 'file' }}")
    assert template_of(load(model)) == "{{ 'file' }}"


def test_of_several_named_templates_the_default_is_taken(model: Path) -> None:
    named = [{"name": "tool_use", "template": "{{ 1 }}"}, {"name": "default", "template": "{{ 2 }}"}]
    change(model / "tokenizer_config.json", chat_template=named)
    assert template_of(load(model)) == "{{ 2 }}"


@pytest.mark.parametrize("inline", [True, False])
def test_a_configured_template_wins_over_all(model: Path, tmp_path: Path, inline: bool) -> None:
    source = "{% for message in messages %}{{ message }}{% endfor %}"
    path = tmp_path / "mine.jinja"
    path.write_text(source)
    config = EngineConfig(model=str(model), device="cpu", chat_template=source if inline else str(path))
    assert template_of(load_model(config, lambda fraction, phase: None)) == source


def test_a_configured_template_that_does_not_exist_is_named(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.jinja"):
        load_model(EngineConfig(model=str(model), device="cpu", chat_template="nowhere.jinja"), lambda f, p: None)


def test_a_post_processor_that_adds_bos_sets_add_bos(model: Path) -> None:
    single = [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    change(model / "tokenizer.json", post_processor={"type": "TemplateProcessing", "single": single})
    assert SafetensorsCheckpoint(model).text.add_bos


def test_shards_load_to_the_same_weights_and_digest(original: Path, tmp_path: Path) -> None:
    sharded = write_tiny_llama(tmp_path / "sharded", shard_size="100KB")
    assert len(list(sharded.glob("*.safetensors"))) > 1
    whole, parts = load(original), load(sharded)
    assert parts.weights_digest == whole.weights_digest
    for (name, a), (_, b) in zip(whole.module.named_parts(), parts.module.named_parts(), strict=True):
        assert torch.equal(a, b), name


def test_the_digest_depends_on_every_weight_and_on_no_dtype(model: Path, original: Path) -> None:
    digest = load(original).weights_digest
    assert load(original, "bfloat16").weights_digest == digest

    def nudge(weights: dict[str, torch.Tensor]) -> None:
        weights["model.norm.weight"][0] += 1e-3

    change_weights(model, nudge)
    assert load(model).weights_digest != digest


def test_progress_rises_to_one_and_may_give_up_the_load(model: Path) -> None:
    seen: list[float] = []
    load_model(EngineConfig(model=str(model), device="cpu"), lambda fraction, phase: seen.append(fraction))
    assert seen == sorted(seen)
    assert seen[-1] == 1.0
    assert len(seen) > 10

    def give_up(fraction: float, phase: str) -> None:
        if fraction > 0.5:
            raise InterruptedError(phase)

    with pytest.raises(InterruptedError):
        load_model(EngineConfig(model=str(model), device="cpu"), give_up)


def drop(name: str) -> Callable[[Path], None]:
    return lambda model: (model / name).unlink()


def setting(**values: object) -> Callable[[Path], None]:
    return lambda model: change(model / "config.json", **values)


def cut(name: str, keep: float) -> Callable[[Path], None]:
    def apply(model: Path) -> None:
        content = (model / name).read_bytes()
        (model / name).write_bytes(content[: int(len(content) * keep)])

    return apply


def overwrite(name: str, content: bytes) -> Callable[[Path], None]:
    def apply(model: Path) -> None:
        (model / name).write_bytes(content)

    return apply


def weights(edit: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    return lambda model: change_weights(model, edit)


def index(weight_map: object) -> Callable[[Path], None]:
    def apply(model: Path) -> None:
        (model / "model.safetensors").unlink()
        write_json(model / "model.safetensors.index.json", {"weight_map": weight_map})

    return apply


def pipe(name: str) -> Callable[[Path], None]:
    def apply(model: Path) -> None:
        (model / name).unlink(missing_ok=True)
        os.mkfifo(model / name)

    return apply


def device(name: str) -> Callable[[Path], None]:
    def apply(model: Path) -> None:
        (model / name).unlink(missing_ok=True)
        (model / name).symlink_to("/dev/zero")

    return apply


def tokenizer(edit: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def apply(model: Path) -> None:
        content = json.loads((model / "tokenizer.json").read_text())
        edit(content)
        write_json(model / "tokenizer.json", content)

    return apply


READ_FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors",
    "chat_template.jinja",
)  # fmt: skip

BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "no config": (drop("config.json"), "config.json: missing file"),
    "no tokenizer": (drop("tokenizer.json"), "tokenizer.json: missing file"),
    "no weights": (drop("model.safetensors"), "has neither model.safetensors nor"),
    "config is no json": (overwrite("config.json", b"{"), "config.json: cannot be read as JSON"),
    "config is a list": (overwrite("config.json", b"[]"), "config.json: must hold a JSON object"),
    "generation config is no json": (overwrite("generation_config.json", b"\xff"), "generation_config.json: cannot"),
    "truncated weights": (cut("model.safetensors", 0.5), "model.safetensors: corrupt or truncated"),
    "truncated header": (cut("model.safetensors", 0.001), "model.safetensors: corrupt or truncated"),
    "empty weights": (overwrite("model.safetensors", b""), "model.safetensors: corrupt or truncated"),
    "garbage weights": (overwrite("model.safetensors", bytes(range(256)) * 8), "model.safetensors: corrupt"),
    "missing tensor": (weights(lambda w: w.pop("model.norm.weight")), "first is 'model.norm.weight'"),
    "foreign tensor": (
        weights(lambda w: w.update({"model.layers.0.self_attn.q_norm.weight": torch.ones(16)})),
        "do not belong to LlamaForCausalLM, the first is 'model.layers.0.self_attn.q_norm.weight'",
    ),
    "wrong shape": (
        weights(lambda w: w.update({"model.norm.weight": torch.ones(3)})),
        "'model.norm.weight' has shape [3], the model needs [64]",
    ),
    "integer tensor": (
        weights(lambda w: w.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)})),
        "type torch.int8, which is not supported (supported: float32",
    ),
    "index without shard": (index({"model.norm.weight": "gone.safetensors"}), "gone.safetensors: missing file"),
    "index out of the directory": (index({"model.norm.weight": "../x.safetensors"}), "is no file name"),
    "index without map": (index(None), "'weight_map' is missing or empty"),
    "other architecture": (
        setting(architectures=["MixtralForCausalLM"]),
        "'MixtralForCausalLM' is not supported (supported: LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM,",
    ),
    **{
        method: (
            setting(quantization_config={"quant_method": method, "bits": 4}),
            f"quantised with '{method}' ('quantization_config') are not supported (supported: float32, float16,",
        )
        for method in ("fp8", "awq", "gptq", "bitsandbytes", "compressed-tensors")
    },
    "no method": (setting(quantization_config={"bits": 4}), "quantised with 'unnamed' ('quantization_config')"),
    "FP8 tensor": (
        weights(lambda w: w.update({"model.norm.weight": torch.ones(64).to(torch.float8_e4m3fn)})),
        "type torch.float8_e4m3fn, which is not supported (supported: float32",
    ),
    "other activation": (setting(hidden_act="gelu"), "'hidden_act' 'gelu' is not supported"),
    "other rope": (
        setting(rope_parameters={"rope_type": "dynamic", "factor": 2.0}),
        "rope type 'dynamic' is not supported (supported: default, linear, llama3, yarn)",
    ),
    "yarn with mscale": (
        setting(rope_parameters={"rope_type": "yarn", "factor": 2.0, "mscale": 1.0}),
        "rope type 'yarn' with 'mscale' is not supported",
    ),
    "rope that shrinks": (setting(rope_parameters={"rope_type": "linear", "factor": 0.5}), "factor 0.5 is below 1"),
    "partial rope": (setting(partial_rotary_factor=0.5), "'partial_rotary_factor' is not supported"),
    "heads do not divide": (setting(num_key_value_heads=3), "not a multiple of 3 key/value heads"),
    "no size": (setting(hidden_size=None), "'hidden_size' must be an integer"),
    "size is text": (setting(vocab_size="many"), "'vocab_size' must be an integer, not 'many'"),
    "negative size": (setting(num_hidden_layers=-1), "impossible model shape"),
    "layers without end": (setting(num_hidden_layers=10**7), "impossible model shape: 10000000 layers"),
    "layers that no file has": (setting(num_hidden_layers=500), "tensors are missing"),
    "vocabulary without end": (setting(vocab_size=10**9), "has shape [260, 64], the model needs [1000000000, 64]"),
    "width without end": (setting(intermediate_size=10**9), "the model needs [1000000000, 64]"),
    "heads wider than their weights": (setting(head_dim=2**16), "the model needs [262144, 64]"),
    "heads without end": (setting(head_dim=10**9), "a size is out of range"),
    "size of 41 bits": (setting(hidden_size=2**40), "impossible model shape: a size is out of range"),
    "size of 70 bits": (setting(hidden_size=2**70), "'hidden_size' is out of range"),
    "positions without end": (setting(max_position_embeddings=10**12), "a size is out of range"),
    "NaN for a number": (setting(rms_norm_eps=float("nan")), "'rms_norm_eps' must be finite"),
    "infinite theta": (
        setting(rope_parameters={"rope_type": "default", "rope_theta": float("inf")}),
        "'rope_theta' must be finite",
    ),
    "BOS beyond the vocabulary": (
        lambda model: (
            change(model / "tokenizer_config.json", bos_token=None),
            change(model / "config.json", bos_token_id=10**9),
        ),
        "BOS token 1000000000 is outside the vocabulary",
    ),
    "nested without end": (overwrite("config.json", b"[" * 100_000), "config.json: cannot be read as JSON"),
    "number of 5000 digits": (overwrite("config.json", b'{"a": ' + b"9" * 5000 + b"}"), "cannot be read as JSON"),
    "empty tokenizer": (overwrite("tokenizer.json", b"{}"), "The tokenizer cannot be read"),
    "tokenizer without vocabulary": (overwrite("tokenizer.json", b'{"model": {"type": "BPE"}}'), "The tokenizer"),
    "tokenizer with a negative id": (
        tokenizer(lambda t: t["added_tokens"].append({**t["added_tokens"][0], "id": -5, "content": "x"})),
        "The tokenizer cannot be read",
    ),
    "tokenizer with a giant id": (
        tokenizer(lambda t: t["model"]["vocab"].update(giant=4 * 10**9)),
        "a token of id 4000000000",
    ),
    "tokenizer without decoder": (tokenizer(lambda t: t.update(decoder=None)), "decoder none is not supported"),
    "template that does not compile": (
        lambda model: change(model / "tokenizer_config.json", chat_template="{% for %}"),
        "template does not compile",
    ),
    **{f"{name} is a pipe": (pipe(name), "not a regular file") for name in READ_FILES},
    **{f"{name} is a device": (device(name), "not a regular file") for name in READ_FILES},
    "end token is text": (setting(eos_token_id="</s>"), "'eos_token_id' must be a token id or a list"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_directory_is_refused_in_one_line_that_names_the_file(model: Path, case: str) -> None:
    damage, message = BROKEN[case]
    damage(model)
    with pytest.raises(ModelError) as caught:
        load(model)
    assert message in str(caught.value)
    assert str(model) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["a" * 5000, "/" + "a/" * 3000, "~nobody_of_this_name/model", "\0"])
def test_a_name_that_no_file_can_have_is_one_line(name: str) -> None:
    with pytest.raises(ModelError) as caught:
        load_model(EngineConfig(model=name, device="cpu"), lambda fraction, phase: None)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 6000


@pytest.mark.parametrize("kind", ["/dev/zero", "pipe"])
def test_a_model_or_a_template_that_is_no_regular_file_is_refused(model: Path, tmp_path: Path, kind: str) -> None:
    path = Path(kind)
    if kind == "pipe":
        path = tmp_path / "pipe"
        os.mkfifo(path)
    with pytest.raises(ModelError, match="not a regular file"):
        load(path)
    config = EngineConfig(model=str(model), device="cpu", chat_template=str(path))
    with pytest.raises(ConfigError, match="not a regular file"):
        load_model(config, lambda fraction, phase: None)


def test_end_tokens_without_a_logit_are_left_out(model: Path) -> None:
    change(model / "config.json", eos_token_id=[2, 10**9])
    change(model / "generation_config.json", eos_token_id=[3, 10**30])
    assert load(model).eos_ids == (2, 3)


def test_the_room_for_a_sequence_is_asked_for_before_memory_is(model: Path) -> None:
    change(model / "config.json", max_position_embeddings=2**31 - 1)
    with pytest.raises(ConfigError, match="one sequence of max_model_len 2147483647 needs"):
        build_engine(EngineConfig(model=str(model), device="cpu"), lambda fraction, phase: None)


@pytest.mark.parametrize("wrong", [{"top_p": 7}, {"top_k": -5}, {"temperature": -1.0}, {"temperature": 1e10}])
def test_sampling_defaults_out_of_range_are_the_models_fault_and_not_each_requests(
    model: Path, wrong: dict[str, float]
) -> None:
    change(model / "generation_config.json", **wrong)
    config = EngineConfig(model=str(model), device="cpu", kv_cache_memory_bytes=1 << 24)
    with pytest.raises(ModelError, match=f"sampling defaults are wrong: {next(iter(wrong))}"):
        build_engine(config, lambda fraction, phase: None)


def test_a_model_that_is_nowhere_lists_what_can_be_given() -> None:
    message = r"'nothing' is neither a directory, nor a GGUF file, nor one of: smollm2, nor a hub's repository"
    with pytest.raises(ModelError, match=message):
        load(Path("nothing"))


def test_a_longer_window_than_the_models_is_refused(model: Path) -> None:
    with pytest.raises(ConfigError, match="max_model_len 513 is out of range"):
        load(model, max_model_len=513)


def test_numerics_and_back_ends_that_a_device_lacks_raise_instead_of_falling_back() -> None:
    from engine.attention.registry import choose
    from engine.layers.row_ops import row_ops

    with pytest.raises(ConfigError, match="not available on device 'mps'"):
        row_ops("invariant", torch.device("mps"))
    with pytest.raises(ConfigError, match="'torch' is not available"):
        choose(torch.device("cpu"), "invariant", "torch")
    with pytest.raises(ConfigError, match="not available"):
        choose(torch.device("mps"), "default")
    with pytest.raises(ConfigError, match="unknown"):
        choose(torch.device("cpu"), "default", "nonsense")
