"""A receiver that keeps what peers tell, and checks that they tell it in order."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

from router.dispatches import Dispatch
from router.sharing import DispatchSharing, PeerAddress

ROOT = Path(__file__).parents[2]


class RemoteLeases:
    """`live` are the leases by peer and id."""

    def __init__(self) -> None:
        self.live: dict[tuple[str, int], Dispatch] = {}
        self.answered: set[tuple[str, int]] = set()
        self.keys: list[bytes] = []
        self.total = 0

    @property
    def tokens(self) -> int:
        return sum(dispatch.prompt_tokens for dispatch in self.live.values())

    def peer_dispatched(self, peer_id: str, dispatch: Dispatch) -> None:
        assert (peer_id, dispatch.lease_id) not in self.live
        self.live[peer_id, dispatch.lease_id] = dispatch
        self.keys += dispatch.new_keys
        self.total += 1

    def peer_first_output(self, peer_id: str, lease_id: int) -> None:
        assert (peer_id, lease_id) in self.live
        self.answered.add((peer_id, lease_id))

    def peer_released(self, peer_id: str, lease_id: int) -> None:
        del self.live[peer_id, lease_id]
        self.answered.discard((peer_id, lease_id))

    def forget_peer(self, peer_id: str) -> None:
        self.live = {key: dispatch for key, dispatch in self.live.items() if key[0] != peer_id}
        self.answered = {key for key in self.answered if key[0] != peer_id}


def dispatch(lease_id: int, *, tokens: int = 100, keys: tuple[bytes, ...] = ()) -> Dispatch:
    return Dispatch(lease_id, f"w{lease_id % 3}/0", tokens, tokens // 2, keys)


async def tell_and_wait(leases: int) -> None:
    """A process that has some leases, prints its address, and releases lease 1 when it is sent a line."""
    sharing = DispatchSharing("tcp://127.0.0.1:*")
    sharing.open()
    observer = sharing.observer("tiny")
    for lease_id in range(1, leases + 1):
        observer.dispatched(dispatch(lease_id))
    print(sharing.address, flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    observer.released(1)
    await asyncio.Event().wait()


class Teller:
    """Such a process."""

    def __init__(self, leases: int) -> None:
        command = [sys.executable, "-m", "tests.support.remote_leases", str(leases)]
        self.process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        self.address = PeerAddress(self.process.stdout.readline().decode().strip())

    def release_one(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


if __name__ == "__main__":
    asyncio.run(tell_and_wait(int(sys.argv[1])))
