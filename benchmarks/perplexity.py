"""Negative log likelihood of a fixed text, sample by sample, against the figures kept in tests/baselines/.

    python -m benchmarks.perplexity            compare and print
    python -m benchmarks.perplexity --refresh  write the figures anew, after a change that is meant to move them

One JSON file per model: the packaged one, and a random model per architecture that tests/support/decoders.py writes
from its seed.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from benchmarks.plan_driver import PlanDriver
from engine.config import EngineConfig
from engine.loader.load import LoadedModel, load_model
from engine.text.tokenizer import TextCodec

BASELINES = Path(__file__).parent.parent / "tests" / "baselines"
TEXT = BASELINES / "text.txt"
MAX_TOKENS = 256
CHUNK = 48

DECODERS = ("llama3 rope", "mistral, windows", "qwen2, windows behind full", "qwen3")
MODELS = ("smollm2", *DECODERS)

TOLERANCES = {"float32": 1e-4, "bfloat16": 0.02, "int8": 0.03, "fp8": 0.05}
"""Allowed difference of a sample's mean per token, by dtype: what other kernels and machines may do to the sums.

"int8" and "fp8" are bfloat16 with weights in 8 bits. The first needs the C++ operators; with the second the activations
of a chunk are rounded to e4m3 as well, as on a GPU.
"""

SMALL = {
    "int8": {"weights": "int8"},
    "fp8": {"weights": "fp8"},
    "kv_fp8": {"kv_dtype": "fp8", "operators": "torch"},
    "fp8_both": {"weights": "fp8", "kv_dtype": "fp8"},
}
"""What is in 8 bits; those without a tolerance are printed and not kept."""


def baseline_path(model: str) -> Path:
    return BASELINES / f"{model.replace(', ', '-').replace(' ', '-')}.json"


def samples() -> list[str]:
    return [sample.strip("\n") for sample in TEXT.read_text().split("\n\n") if sample.strip()]


@contextmanager
def model_path(model: str) -> Iterator[str]:
    """Yield what to load: a name, or a directory that is written for as long as it is needed."""
    if model not in DECODERS:
        yield model
        return
    from tests.support.decoders import write_decoder

    with tempfile.TemporaryDirectory() as directory:
        yield str(write_decoder(Path(directory), model))


def load(path: str, dtype: str) -> LoadedModel:
    config = {"model": path, "dtype": dtype, "device": "cpu", "max_model_len": 2 * MAX_TOKENS}
    if dtype in SMALL:
        config |= {"dtype": "bfloat16"} | SMALL[dtype]
    return load_model(EngineConfig(**config), lambda fraction, phase: None)  # type: ignore[arg-type]


def mean_nlls(loaded: LoadedModel) -> list[float]:
    """Return each sample's negative log likelihood per token, in nats, of all tokens but the first."""
    codec = TextCodec.from_assets(loaded.text, loaded.assets, vocab_size=loaded.vocab_size)
    driver = PlanDriver(loaded, num_blocks=2 * MAX_TOKENS // 64 + 1)
    means = []
    for sample in samples():
        tokens = codec.encode(sample, parse_special=False, add_bos=True)[:MAX_TOKENS]
        logprobs = torch.log_softmax(driver.all_logits(tokens, CHUNK)[:-1].double(), dim=-1)
        chosen = logprobs[torch.arange(len(tokens) - 1), torch.tensor(tokens[1:])]
        means.append(-chosen.mean().item())
    return means


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--refresh", action="store_true")
    parser.add_argument("--model", choices=MODELS, action="append")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for model in arguments.model or MODELS:
        path = baseline_path(model)
        kept = json.loads(path.read_text()) if path.exists() else {}
        with model_path(model) as source:
            found = {dtype: mean_nlls(load(source, dtype)) for dtype in TOLERANCES | SMALL}
        for dtype, means in found.items():
            before = kept.get(dtype, [math.nan] * len(means))
            worst = max(abs(new - old) for new, old in zip(means, before, strict=True))
            perplexity = math.exp(sum(means) / len(means))
            print(f"{model:28} {dtype:9} perplexity {perplexity:9.3f}, largest difference of a sample {worst:.1e}")
        if arguments.refresh:
            rounded = {
                dtype: [round(mean, 6) for mean in means] for dtype, means in found.items() if dtype in TOLERANCES
            }
            path.write_text(json.dumps(rounded, indent=1) + "\n")


if __name__ == "__main__":
    main()
