"""Random models of a few thousand parameters, written as Hugging Face directories that any loader reads.

The tokenizer is byte-level without merges: id = byte + 4 behind the specials <unk> <s> </s> <|end|>, so every text has
ids and every id is text.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<|end|>")
VOCAB_SIZE = len(SPECIAL_TOKENS) + 256
CHAT_TEMPLATE = (
    "{% for message in messages %}<s>{{ message['role'] }}\n{{ message['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


def byte_tokenizer() -> Tokenizer:
    """Return a tokenizer whose ids are bytes behind the special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return tokenizer


def write_tiny_llama(
    directory: Path,
    *,
    seed: int = 0,
    hidden_size: int = 64,
    intermediate_size: int = 96,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int | None = None,
    vocab_size: int = VOCAB_SIZE,
    max_positions: int = 512,
    tied: bool = True,
    attention_bias: bool = False,
    mlp_bias: bool = False,
    rope_parameters: dict[str, object] | None = None,
    shard_size: str = "1GB",
) -> Path:
    """Write config, weights (float32), tokenizer, template and generation config; return the directory."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim or hidden_size // heads,
        max_position_embeddings=max_positions,
        tie_word_embeddings=tied,
        attention_bias=attention_bias,
        mlp_bias=mlp_bias,
        bos_token_id=1,
        eos_token_id=2,
        rope_parameters=rope_parameters or {"rope_type": "default", "rope_theta": 10000.0},
    )
    return write_model(directory, LlamaForCausalLM, config, seed=seed, shard_size=shard_size)


SHAPE: dict[str, object] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def write_tiny(directory: Path, architecture: str, *, seed: int = 0, shard_size: str = "1GB", **values: object) -> Path:
    """Write a model of any architecture; `values` are transformers' configuration keys on top of `SHAPE`."""
    import transformers

    config = getattr(transformers, architecture.replace("ForCausalLM", "Config"))(**{**SHAPE, **values})
    return write_model(directory, getattr(transformers, architecture), config, seed=seed, shard_size=shard_size)


def write_model(directory: Path, kind: type, config: object, *, seed: int, shard_size: str) -> Path:
    torch.manual_seed(seed)
    model = kind(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms start as ones and biases as zeros: neither would show a mistake
                parameter.add_(torch.randn_like(parameter) * 0.1)
            else:  # wider than the usual 0.02, which leaves all logits nearly equal
                parameter.normal_(0.0, 0.15)
    model.save_pretrained(directory, max_shard_size=shard_size)
    byte_tokenizer().save(str(directory / "tokenizer.json"))
    write_json(
        directory / "tokenizer_config.json",
        {
            "bos_token": {"content": "<s>"},
            "eos_token": "<|end|>",
            "unk_token": "<unk>",
            "chat_template": CHAT_TEMPLATE,
        },
    )
    write_json(
        directory / "generation_config.json",
        {"bos_token_id": 1, "eos_token_id": [2, 3], "temperature": 0.7, "top_k": 20, "do_sample": True},
    )
    return directory


def write_json(path: Path, values: object) -> None:
    path.write_text(json.dumps(values, indent=1))
