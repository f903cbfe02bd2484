"""A process that routes over targets of which some break, and says what the metrics of all such processes are."""

from __future__ import annotations

import sys

import msgspec
import zmq

from engine.protocol import EngineLoad
from router.dispatcher import Dispatcher
from router.values import Query
from server.config import RoutingConfig

FAULTS_TO_BREAK = 3


def break_target(dispatcher: Dispatcher, target_id: str) -> None:
    """Fail on a target until its breaker opens."""
    others = set(dispatcher.target_ids) - {target_id}
    for _ in range(FAULTS_TO_BREAK):
        lease = dispatcher.choose(Query(request_id="r", prompt_tokens=1), others)
        assert lease is not None
        lease.release("fault")


def report(dispatcher: Dispatcher, target_id: str, **fields: int) -> None:
    dispatcher.report_load(target_id, msgspec.convert(fields, EngineLoad))


def main(broken: list[str]) -> None:
    """Print the samples of all processes."""
    # Late: prometheus_client decides at import whether its values are shared.
    from server.fleet.model_pool import ModelPool
    from server.fleet.router_metrics import RouterMetrics
    from server.metrics import ServerMetrics

    server = ServerMetrics()
    with zmq.Context() as context:
        pool = ModelPool("tiny", RoutingConfig(), context=context)
        index, dispatcher = pool.feed.index, pool.pool.dispatcher
        for target_id in ("a/0", "b/0"):
            dispatcher.add_target(target_id)
        index.apply("a/0", stored=[bytes([number]) * 32 for number in range(1, 2 + len(broken[1:]))])
        for target_id in broken:
            break_target(dispatcher, target_id)
        RouterMetrics(server.registry, {"tiny": pool}).update()
    print(server.scrape(None).decode())


if __name__ == "__main__":
    main(sys.argv[1:])
