"""EleutherAI's lm-eval through the API beside lm-eval on transformers: one model, float32, three small tasks.

    make lm-eval                                       installs lm-eval into .cache and runs this
    python -m benchmarks.lm_eval --harness PATH/lm_eval

Its `local-completions` asks `headrace serve` for likelihoods (token ids, echo, logprobs, max_tokens 1); its `hf` runs
the same weights, written from our loader as a Hugging Face directory. Prints a JSON object, and exits with 1 when a
metric of right answers differs or a likelihood differs by more than 1e-3 of its own size.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.accuracy import reference_model
from benchmarks.lm_eval_tasks import CHOICES, LAST_WORD, WHOLE_TEXT, write_tasks
from benchmarks.perplexity import samples
from engine.loader.load import open_checkpoint
from tests.support.headrace_server import headrace

TASKS = (CHOICES, LAST_WORD, WHOLE_TEXT)
EXACT = ("acc", "acc_norm")
ALLOWED = 1e-3
WINDOW = 64
"""Tokens that both models see at once: long texts then need several windows."""

Items = dict[tuple[str, int, int], tuple[float, bool | None]]
"""(task, document, choice) to (log likelihood, whether greedy decoding would say it; None where nobody asks)."""


@dataclass(frozen=True)
class Run:
    metrics: dict[str, dict[str, float]]
    items: Items


def write_hf_directory(directory: Path, model: str) -> None:
    """Write weights, configuration and tokenizer of a model that our loader reads, for transformers to load."""
    reference_model(model).save_pretrained(directory)  # type: ignore[operator]
    checkpoint = open_checkpoint(model)
    text = checkpoint.text
    checkpoint.close()
    (directory / "tokenizer.json").write_bytes(text.tokenizer)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (directory / "tokenizer_config.json").write_text(json.dumps({**settings, **text.special_tokens}))


def evaluate(harness: Path, folder: Path, name: str, model: str, model_args: dict[str, object]) -> Run:
    """Run the harness's command line on the tasks in `folder` and read what it has written."""
    output = folder / name
    command = [harness, "run", "--model", model, "--model_args", _joined(model_args), "--device", "cpu"]
    command += ["--tasks", ",".join(TASKS), "--include_path", folder, "--log_samples", "--output_path", output]
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hf"), "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        list(map(str, command)), env={**os.environ, **offline}, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if done.returncode != 0:
        sys.exit(f"{harness} failed on {name}:\n{done.stdout}\n{done.stderr}")
    (results,) = output.rglob("results_*.json")
    found = json.loads(results.read_text())["results"]
    return Run({task: _metrics(found[task]) for task in TASKS}, _items(output))


def _joined(model_args: dict[str, object]) -> str:
    return ",".join(f"{name}={value}" for name, value in model_args.items())


def _metrics(result: dict[str, object]) -> dict[str, float]:
    """Names are `metric,filter`; standard errors are left out."""
    pairs = ((name.partition(",")[0], value) for name, value in result.items() if "stderr" not in name)
    return {name: value for name, value in pairs if isinstance(value, float)}


def _items(output: Path) -> Items:
    items: Items = {}
    for task in TASKS:
        (log,) = output.rglob(f"samples_{task}_*.jsonl")
        for line in log.read_text().splitlines():
            sample = json.loads(line)
            for choice, (response,) in enumerate(sample["resps"]):
                items[task, sample["doc_id"], choice] = _likelihood(response)
    return items


def _likelihood(response: object) -> tuple[float, bool | None]:
    """A pair for choices and continuations, a number for whole texts; in the log both may be text."""
    if isinstance(response, list):
        return float(response[0]), str(response[1]) == "True"
    return float(str(response)), None


def compare(ours: Run, theirs: Run) -> dict[str, object]:
    """Return the figures, with `holds`."""
    report: dict[str, object] = {}
    worst, holds = 0.0, ours.items.keys() == theirs.items.keys()
    for task in TASKS:
        keys = [key for key in theirs.items if key[0] == task]
        pairs = [(ours.items[key], theirs.items[key]) for key in keys]
        differences = [abs(own[0] - other[0]) / abs(other[0]) for own, other in pairs]
        worst = max(worst, *differences)
        exact = [name for name in EXACT if name in theirs.metrics[task]]
        holds &= all(ours.metrics[task][name] == theirs.metrics[task][name] for name in exact)
        report[task] = {
            "headrace": ours.metrics[task],
            "transformers": theirs.metrics[task],
            "likelihoods": len(pairs),
            "largest_relative_difference": max(differences),
            "largest_difference": max(abs(own[0] - other[0]) for own, other in pairs),
            "other_greedy_flags": sum(own[1] != other[1] for own, other in pairs),
        }
    return {**report, "largest_relative_difference": worst, "holds": holds and worst <= ALLOWED}


def through_the_api(harness: Path, folder: Path, model: str, tokenizer: Path) -> Run:
    with headrace(folder, model, served_model_name="model", dtype="float32", max_model_len=512) as server:

        async def address() -> str:
            await server.wait_ready()
            return await server.url()

        settings = {
            "model": "model",
            "base_url": f"{asyncio.run(address())}/v1/completions",
            "tokenizer": tokenizer,
            "num_concurrent": 4,
            # One for the token that the API must generate, and one since `hf` cuts a prompt and its target to the
            # window only after it has taken off the target's last token.
            "max_length": WINDOW + 2,
        }
        return evaluate(harness, folder, "headrace", "local-completions", settings)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--harness", type=Path, required=True, help="the command lm_eval")
    parser.add_argument("--model", default="smollm2")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tasks(folder, samples())
        write_hf_directory(folder / "model", arguments.model)
        ours = through_the_api(arguments.harness, folder, arguments.model, folder / "model")
        settings = {"pretrained": folder / "model", "dtype": "float32", "max_length": WINDOW}
        theirs = evaluate(arguments.harness, folder, "transformers", "hf", settings)
    report = compare(ours, theirs)
    print(json.dumps(report, indent=1))
    sys.exit(not report["holds"])


if __name__ == "__main__":
    main()
