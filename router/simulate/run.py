"""One simulation: gateways and workers are made, requests arrive, and what became of them is summed up."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial

import msgspec

from engine.protocol import EngineLoad
from router.admission import AdmissionLimits
from router.simulate.gateway import Delays, Outcome, SharedDispatches, SimGateway, SimPool
from router.simulate.report import Summary, summarise
from router.simulate.virtual_time import VirtualTime
from router.simulate.worker import SimWorker, WorkerModel
from router.simulate.workload import SimRequest

DECODE_POLICY = "least_kv"


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """What is simulated. With `decode_workers` the `workers` only compute prompts, and KV travels to the others at
    `transfer_rate` tokens/s. `slo_ttft_s` and `slo_tpot_s` are what goodput asks for.
    """

    policy: str = "prefix"
    workers: int = 8
    decode_workers: int = 0
    gateways: int = 1
    seed: int = 0
    worker: WorkerModel = WorkerModel()
    delays: Delays = Delays()
    admission: AdmissionLimits = AdmissionLimits()
    transfer_rate: float = 400_000.0
    slo_ttft_s: float = 2.0
    slo_tpot_s: float | None = None


def simulate(cluster: Cluster, requests: Sequence[SimRequest]) -> Summary:
    """Run all requests to their ends. The same cluster and requests give the same summary."""
    time = VirtualTime()
    world = _World(cluster, time)
    outcomes = [Outcome(request=request) for request in requests]
    rng = random.Random(cluster.seed)
    for outcome in outcomes:
        gateway = world.gateways[rng.randrange(cluster.gateways)]
        time.at(outcome.request.arrival_s, partial(gateway.arrive, outcome))
    time.run()
    for worker in world.workers:
        worker.close_books()
    for gateway in world.gateways:
        gateway.pool.dispatcher.check_integrity()
        assert set(gateway.pool.dispatcher.in_flight.values()) <= {0}, "a lease was not released"
    shed = sum(gateway.shed for gateway in world.gateways)
    return summarise(cluster.policy, outcomes, world.workers, shed, cluster.slo_ttft_s, cluster.slo_tpot_s)


class _World:
    """Everything that exists in one simulation."""

    def __init__(self, cluster: Cluster, time: VirtualTime) -> None:
        self._cluster = cluster
        self._time = time
        self._pools: list[SimPool] = []
        self._decode_pools: list[SimPool] = []
        name = "prefill" if cluster.decode_workers else "worker"
        self.workers = self._make_workers(name, cluster.workers, self._pools)
        self.decode_workers = self._make_workers("decode", cluster.decode_workers, self._decode_pools)
        self.gateways = [self._make_gateway(number) for number in range(cluster.gateways)]
        if cluster.delays.sharing_s is not None and cluster.gateways > 1:
            self._connect(self._pools, cluster.delays.sharing_s)
            self._connect(self._decode_pools, cluster.delays.sharing_s)

    def _make_workers(self, name: str, number: int, pools: Sequence[SimPool]) -> list[SimWorker]:
        tell = partial(self._tell, pools)
        return [SimWorker(f"{name}-{one}/0", self._time, self._cluster.worker, tell) for one in range(number)]

    def _make_gateway(self, number: int) -> SimGateway:
        cluster = self._cluster
        rng = random.Random(f"{cluster.seed}/{number}")
        model = cluster.worker
        index_blocks = 2 * model.cache_blocks * cluster.workers
        make = partial(SimPool, time=self._time, rng=rng, block_tokens=model.block_tokens, index_blocks=index_blocks)
        pool, decode = make(cluster.policy, self.workers, admission_limits=cluster.admission), None
        self._pools.append(pool)
        if self.decode_workers:
            decode = make(DECODE_POLICY, self.decode_workers, admission_limits=None)
            self._decode_pools.append(decode)
        return SimGateway(self._time, cluster.delays, pool, decode, cluster.transfer_rate)

    def _connect(self, pools: Sequence[SimPool], delay_s: float) -> None:
        for number, pool in enumerate(pools):
            peers = [peer.dispatcher for peer in pools if peer is not pool]
            name = f"gateway-{number}"
            pool.dispatcher.observe(SharedDispatches(name, self._time, delay_s, peers), name)

    def _tell(
        self,
        pools: Sequence[SimPool],
        worker: SimWorker,
        load: EngineLoad,
        stored: Sequence[bytes],
        removed: Sequence[bytes],
    ) -> None:
        """Bring a worker's report and its KV events to the gateways."""

        def report() -> None:
            for pool in pools:
                pool.report(worker.worker_id, load)

        def apply() -> None:
            for pool in pools:
                pool.index.apply(worker.worker_id, stored, removed)

        self._time.after(self._cluster.delays.report_s, report)
        if stored or removed:
            self._time.after(self._cluster.delays.events_s, apply)
