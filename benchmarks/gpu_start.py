"""Where the time goes between an engine process's start and its readiness on a GPU.

    python3 -m benchmarks.gpu_start --model random:llama-3.1-8b [--cold]

`--cold` begins with an empty cache of compiled kernels. Shown are the phases as they begin and end, in seconds since
this module was run, the time that compiling kernels took (Triton's own steps, and the C compiler for their launchers,
both as sums over threads) and the longest compilations.
"""

from __future__ import annotations

import time

BEGIN_S = time.perf_counter()

import argparse  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
from typing import Any  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="random:llama-3.1-8b")
    parser.add_argument("--max-running", type=int, default=None)
    parser.add_argument("--max-step-tokens", type=int, default=None)
    parser.add_argument("--cold", action="store_true")
    options = parser.parse_args()
    if options.cold:
        os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp(prefix="triton-")
    _told("python")
    import torch

    _told("import torch")
    torch.zeros(1, device="cuda")
    _told("first use of the device")
    from engine.config import EngineConfig
    from engine.runner.build import build_engine

    _told("import the engine")
    compiled, linked = _watch_compiler()
    phases: list[tuple[str, float]] = []

    def on_progress(fraction: float, phase: str) -> None:
        if not phases or phases[-1][0] != phase:
            phases.append((phase, _now_s()))
            print(f"{_now_s():7.2f} s  begins: {phase}", flush=True)

    sizes = {"max_running": options.max_running, "max_step_tokens": options.max_step_tokens}
    config = EngineConfig(model=options.model, **{name: size for name, size in sizes.items() if size is not None})
    build_engine(config, on_progress)
    torch.cuda.synchronize()
    _told("ready")
    kernels_s = sum(seconds for _, seconds in compiled)
    print(f"{len(compiled)} kernels compiled in {kernels_s:.2f} s, {len(linked)} launchers in {sum(linked):.2f} s")
    for name, seconds in sorted(compiled, key=lambda one: -one[1])[:12]:
        print(f"    {seconds:6.2f} s  {name}")
    return 0


def _now_s() -> float:
    return time.perf_counter() - BEGIN_S


def _told(what: str) -> None:
    print(f"{_now_s():7.2f} s  {what}", flush=True)


def _watch_compiler() -> tuple[list[tuple[str, float]], list[float]]:
    """Return lists that grow with (kernel, seconds) and with the seconds of each launcher's C compilation."""
    import triton
    from triton.runtime import build

    compiled: list[tuple[str, float]] = []
    linked: list[float] = []

    def on_compiled(*, src: Any, metadata: Any, metadata_group: Any, times: Any, cache_hit: bool) -> None:  # noqa: ANN401
        if not cache_hit:
            stages = ", ".join(f"{name} {us / 1e6:.2f}" for name, us in times.lowering_stages)
            compiled.append((f"{src.fn.__name__}: {stages}", times.total / 1e6))

    triton.knobs.compilation.listener = on_compiled
    make = build._build

    def timed(*args: Any, **kwargs: Any) -> str:  # noqa: ANN401
        begin_s = time.perf_counter()
        made = make(*args, **kwargs)
        linked.append(time.perf_counter() - begin_s)
        return made

    build._build = timed
    return compiled, linked


if __name__ == "__main__":
    sys.exit(main())
