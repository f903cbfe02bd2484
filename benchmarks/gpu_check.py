"""Checks of the whole engine on a GPU: what may never differ, and tokens against float32 on the CPU.

    python3 -m benchmarks.gpu_check [--models tiny,smollm2-135m] [--device cuda] [--weights dtype,fp8]
                                    [--kv-dtype dtype,fp8]

In invariant mode tokens and logprobs of greedy and seeded requests have to be bitwise the same with graphs or operator
by operator, with one step in flight or two, alone, in chunks, and from the prefix cache; in default mode tokens have to
be the same with one step in flight or two. Some requests have a grammar, and what they write has to be in it. Every
greedy token without one has to be the float32 reference's, up to near ties. Launching runs under the guard against
hidden waits. With fp8 for weights or KV all of that with 8 bits, and the kernels against float64 first. Exit code 1
when a check fails.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product

import torch
from torch import Tensor

from benchmarks.gpu_check_grammars import EOS_ID, byte_pool, constrained, fault_of
from benchmarks.plan_driver import PlanDriver
from engine.config import EngineConfig, KVFormat, WeightFormat
from engine.core import EngineCore
from engine.grammar.pool import GrammarPool
from engine.layers.linear import Linear, values_of
from engine.layers.row_ops import row_ops
from engine.loader.load import LoadedModel, load_model
from engine.models.llama import Llama
from engine.plan import StepPlan
from engine.protocol import EngineInfo, GenerateRequest, Numerics, SamplingParams, TokenLogprobs
from engine.runner.kv_cache import KVCache
from engine.runner.runner import TorchRunner
from engine.runner.wait_guard import forbid_waits

BLOCK_SIZE = 64
NUM_BLOCKS = 256
MAX_MODEL_LEN = 2048
MAX_SLOTS = 24
NEAR_TIE = 0.1
"""Logits of the random models have a spread of about 1, and bfloat16 moves each by a few hundredths."""

NEAR_TIE_FP8 = 0.4
"""With weights in 8 bits a prompt's activations are rounded to e4m3 as well; with KV in 8 bits keys and values are."""

Format = tuple[WeightFormat, KVFormat]
"""What of a model is in 8 bits."""

Streams = dict[str, tuple[list[int], list[TokenLogprobs]]]


class GuardedRunner(TorchRunner):
    """Steps without filters or logprobs are launched under the guard. `guarded` counts them."""

    guarded = 0
    guard = False

    def launch(self, plan: StepPlan) -> None:
        if not self.guard:
            super().launch(plan)
            return
        type(self).guarded += 1
        with forbid_waits(self._device):
            super().launch(plan)


def load(
    model: str,
    numerics: Numerics,
    device: str,
    dtype: str = "bfloat16",
    *,
    formats: Format = ("dtype", "dtype"),
) -> LoadedModel:
    config = EngineConfig(
        model=f"random:{model}",
        numerics=numerics,
        device=device,  # type: ignore[arg-type]
        dtype=dtype,  # type: ignore[arg-type]
        weights=formats[0],
        kv_dtype=formats[1],
        operators="torch" if device == "cpu" else "auto",  # the reference, and the interpreter's counterpart
        max_model_len=MAX_MODEL_LEN,
    )
    return load_model(config, lambda fraction, phase: None)


def make_core(
    loaded: LoadedModel,
    numerics: Numerics,
    grammars: GrammarPool,
    *,
    graphs: bool,
    in_flight: int,
    step_tokens: int,
    cache: bool = False,
) -> EngineCore:
    num_blocks = (NUM_BLOCKS,) * len(loaded.kv_groups)
    on_cpu = loaded.device.type == "cpu"
    blocks = KVCache(loaded.kv_groups, num_blocks, BLOCK_SIZE, loaded.kv_dtype, loaded.device, keeps_finite=on_cpu)
    runner = GuardedRunner(
        loaded.module,
        blocks,
        block_size=BLOCK_SIZE,
        max_slots=MAX_SLOTS,
        max_model_len=MAX_MODEL_LEN,
        vocab_size=loaded.vocab_size,
        device=loaded.device,
        max_in_flight=in_flight,
        graphs=graphs,
    )
    runner.warm_up(lambda fraction, phase: None)
    info = EngineInfo(
        model="random",
        incarnation="0",
        weights_digest=loaded.weights_digest,
        architecture=loaded.architecture,
        dtype="bfloat16",
        device=loaded.device.type,
        numerics=numerics,
        operators=loaded.operators,
        max_model_len=MAX_MODEL_LEN,
        vocab_size=loaded.vocab_size,
        eos_ids=(EOS_ID,),
        block_size=BLOCK_SIZE,
        kv_groups=loaded.kv_groups,
        kv_capacity_tokens=(NUM_BLOCKS - 1) * BLOCK_SIZE,
        max_running=MAX_SLOTS,
        text=loaded.text,
    )
    config = EngineConfig(max_step_tokens=step_tokens, in_flight_steps=in_flight, prefix_cache=cache)
    core = EngineCore(info, config, runner, num_blocks, grammars=grammars)
    core.check_runner = runner  # type: ignore[attr-defined]
    return core


def requests(vocab: int, logprobs: int | None) -> list[GenerateRequest]:
    """Greedy, seeded, filtered, with a penalty, constrained; prompts of a few tokens up to several blocks."""
    rng = random.Random(0)
    samplings: list[dict[str, float]] = [
        {"temperature": 0.0},
        {"temperature": 0.8, "seed": 11},
        {"temperature": 1.0, "top_p": 0.9, "seed": 12},
        {"temperature": 0.7, "top_k": 40, "min_p": 0.01, "seed": 13, "frequency_penalty": 0.4},
    ]
    plain = samplings[:2]
    made = []
    for index in range(12):
        own = samplings[index % 4] if logprobs is not None else plain[index % 2]
        sampling = SamplingParams(max_tokens=24 + 5 * index, ignore_eos=True, logprobs=logprobs, **own)  # type: ignore[arg-type]
        prompt = rng.choices(range(vocab), k=rng.choice([3, 17, 64, 130, 333, 700]))
        made.append(GenerateRequest(request_id=f"r{index}", prompt_ids=prompt, sampling=sampling))
    grammatical = constrained([one.prompt_ids for one in made[:5]], plain=logprobs is None, logprobs=logprobs)
    rng.shuffle(mixed := made + grammatical)
    return mixed


def run(core: EngineCore, wanted: Sequence[GenerateRequest]) -> Streams:
    """Run to the end; half of the requests come while the others run."""
    streams: Streams = {request.request_id: ([], []) for request in wanted}
    half = (len(wanted) + 1) // 2
    for request in wanted[:half]:
        core.submit(request)
    late, steps = list(wanted[half:]), 0
    while core.has_work or late:
        steps += 1
        if late and steps % 3 == 0:
            core.submit(late.pop(0))
        for output in core.step():
            assert output.error is None, output
            streams[output.request_id][0].extend(output.token_ids)
            streams[output.request_id][1].extend(output.logprobs or ())
    return streams


class Checks:
    def __init__(self) -> None:
        self.failures = 0

    def __call__(self, name: str, passed: bool, note: str = "") -> None:
        self.failures += not passed
        print(f"{'ok    ' if passed else 'FAILED'} {name} {note}", flush=True)


def difference(actual: Streams, expected: Streams) -> str:
    """Say where two runs differ first, or nothing."""
    for request_id, (tokens, logprobs) in expected.items():
        got_tokens, got_logprobs = actual[request_id]
        if got_tokens != tokens:
            at = next((i for i, (a, b) in enumerate(zip(got_tokens, tokens, strict=False)) if a != b), -1)
            return f"{request_id}: token {at} of {len(tokens)}"
        for at, (one, other) in enumerate(zip(got_logprobs, logprobs, strict=True)):
            if one != other:
                return f"{request_id}: logprobs of token {at}: {one.logprob} {other.logprob}"
    return ""


def check_grammars(checks: Checks, name: str, wanted: Sequence[GenerateRequest], streams: Streams, vocab: int) -> None:
    """Check that every constrained output is one of its grammar's."""
    some = [request for request in wanted if request.grammar is not None]
    faults = list(filter(None, (fault_of(one, streams[one.request_id][0], vocab) for one in some)))
    checks(f"{name}: {len(some)} constrained outputs are what their grammars allow", not faults, "; ".join(faults))


def check_invariant(checks: Checks, model: str, device: str, formats: Format) -> None:
    loaded = load(model, "invariant", device, formats=formats)
    model = named(model, formats)
    grammars = byte_pool(loaded.vocab_size)
    wanted = requests(loaded.vocab_size, logprobs=2)

    def core(**settings: int | bool) -> EngineCore:
        kept = {"graphs": device == "cuda", "in_flight": 2, "step_tokens": 4096, **settings}
        return make_core(loaded, "invariant", grammars, **kept)  # type: ignore[arg-type]

    expected = run(core(graphs=False, in_flight=1), wanted)
    distinct = len({tuple(tokens[-8:]) for tokens, _ in expected.values()})
    checks(f"{model} invariant: the requests end differently", distinct > 12, f"({distinct} of {len(wanted)})")
    check_grammars(checks, f"{model} invariant", wanted, expected, loaded.vocab_size)

    def same(name: str, actual: Streams) -> None:
        found = difference(actual, {key: expected[key] for key in actual})
        checks(f"{model} invariant, bitwise: {name}", not found, found)

    same("operator by operator, overlapped", run(core(graphs=False), wanted))
    same("graphs, synchronous", run(core(in_flight=1), wanted))
    same("graphs, overlapped", run(core(), wanted))
    same("in chunks", run(core(step_tokens=48), wanted))
    alone = core()
    same("alone", {key: stream for one in wanted for key, stream in run(alone, [one]).items()})
    caching = core(cache=True)
    run(caching, wanted)
    hits = caching.load().cached_tokens_total
    same("from the prefix cache", run(caching, wanted))
    checks(f"{model} invariant: the cache was hit", caching.load().cached_tokens_total > hits)
    caching.check_integrity()
    grammars.close()


def check_default(checks: Checks, source: str, device: str, formats: Format) -> None:
    loaded = load(source, "default", device, formats=formats)
    model = named(source, formats)
    wanted = requests(loaded.vocab_size, logprobs=None)
    graphs = device == "cuda"
    grammars = byte_pool(loaded.vocab_size)
    streams = []
    for in_flight in (1, 2):
        core = make_core(loaded, "default", grammars, graphs=graphs, in_flight=in_flight, step_tokens=4096)
        core.check_runner.guard = True  # type: ignore[attr-defined]
        streams.append(run(core, wanted))
    found = difference(streams[1], streams[0])
    # Requests arrive by step, so both runs make the same batches.
    checks(f"{model} default: overlapped and synchronous give the same tokens", not found, found)
    checks(f"{model} default: no hidden waits", GuardedRunner.guarded > 0, f"({GuardedRunner.guarded} launches)")
    check_grammars(checks, f"{model} default", wanted, streams[0], loaded.vocab_size)
    grammars.close()
    near_tie = NEAR_TIE_FP8 if "fp8" in formats else NEAR_TIE
    check_reference(checks, source, loaded, wanted, streams[0], near_tie)


def named(model: str, formats: Format) -> str:
    weights, kv = formats
    return model + (f" {weights}" if weights != "dtype" else "") + (f" KV {kv}" if kv != "dtype" else "")


def check_reference(
    checks: Checks,
    model: str,
    loaded: LoadedModel,
    wanted: Sequence[GenerateRequest],
    streams: Streams,
    near_tie: float,
) -> None:
    """Compare greedy tokens with the same weights in float32 on the CPU, given the tokens before."""
    assert isinstance(loaded.module, Llama)
    reference = load(model, "default", "cpu", "float32")
    assert isinstance(reference.module, Llama)
    unpack(reference.module)
    for (_, target), (_, source) in zip(reference.module.named_parts(), loaded.module.named_parts(), strict=True):
        target.copy_(source.to_dense())
    worst, exact, total = 0.0, 0, 0
    for request in wanted:
        if request.grammar is not None or request.sampling.temperature > 0 or len(request.prompt_ids) > 400:
            continue
        tokens = streams[request.request_id][0]
        driver = PlanDriver(reference, num_blocks=64, block_size=BLOCK_SIZE)
        logits = driver.all_logits([*request.prompt_ids, *tokens], 512)[len(request.prompt_ids) - 1 : -1]
        best = logits.max(dim=1)
        gap = best.values - logits.gather(1, torch.tensor(tokens)[:, None]).squeeze(1)
        worst = max(worst, float(gap.max()))
        exact += int((gap == 0).sum())
        total += len(tokens)
    note = f"({exact} of {total} the same, the worst {worst:.3f} below the best logit)"
    kept = str(loaded.kv_dtype).removeprefix("torch.")
    checks(
        f"{model} {loaded.operators}, KV {kept}: greedy tokens against float32", total > 50 and worst <= near_tie, note
    )


def unpack(module: Llama) -> None:
    """Undo `Llama.pack`: of packed weights the named parts are copies, and to fill these changes nothing."""
    module.head = module.embedding if module.config.tied_embeddings else _unpacked(module.head)
    for part in module.modules():
        if isinstance(part, Linear):
            part.weight = _unpacked(part.weight)


def _unpacked(weight: Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(values_of(weight).clone(), requires_grad=False)


def timed(name: str, call: Callable[[], None]) -> None:
    begin_s = time.perf_counter()
    call()
    print(f"       {name}: {time.perf_counter() - begin_s:.1f} s", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="tiny,smollm2-135m")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--weights", default="dtype,fp8")
    parser.add_argument("--kv-dtype", default="dtype,fp8")
    args = parser.parse_args()
    checks = Checks()
    row_ops("default", torch.device(args.device))  # fails early where triton is missing
    all_formats = list(product(args.weights.split(","), args.kv_dtype.split(",")))
    if any("fp8" in formats for formats in all_formats) and args.device == "cuda":
        from benchmarks.gpu_check_fp8 import check_fp8_kernels

        check_fp8_kernels(checks)
    for model, formats in product(args.models.split(","), all_formats):
        for name, check in (("invariant", check_invariant), ("default", check_default)):
            call = partial(check, checks, model, args.device, formats)
            try:
                timed(f"{named(model, formats)} {name}", call)
            except Exception as error:  # the other checks still say something
                import traceback

                traceback.print_exc()
                checks(f"{named(model, formats)} {name}: {type(error).__name__}", passed=False)
    print("all passed" if not checks.failures else f"{checks.failures} checks FAILED")
    return min(checks.failures, 1)


if __name__ == "__main__":
    sys.exit(main())
