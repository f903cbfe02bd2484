"""When requests are sent: so many at once, or at the times of a Poisson process whatever the server does.

Under a rate a request is due at its time and its latency counts from there; nothing waits for an answer but the later
turns of the same conversation, which are due when the answer before is there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import msgspec

from server.bench.serve_client import LoadClient, Prompt, RequestOptions
from server.bench.serve_records import RequestRecord
from server.bench.serve_workload import Conversation, ConversationSource, Turn, arrivals

OnRecord = Callable[[RequestRecord], object]


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """Exactly one of `concurrency` and `rate` (conversations per second) is given, and at least one end."""

    concurrency: int | None = None
    rate: float | None = None
    requests: int | None = None
    duration_s: float | None = None
    """No request is due at this time or later; those sent before are read to their end."""
    think_s: float = 0.0


class LoadRun:
    """One load over one client. Its clock is the client's."""

    def __init__(
        self,
        client: LoadClient,
        options: RequestOptions,
        source: ConversationSource,
        load: Load,
        *,
        turns: int = 1,
        seed: int = 0,
        on_record: OnRecord = lambda record: None,
    ) -> None:
        self._client = client
        self._options = options
        self._source = source
        self._load = load
        self._turns = turns
        self._seed = seed
        self._on_record = on_record
        self.records: list[RequestRecord] = []
        """Of answers that have ended, in the order in which they did."""

    async def run(self) -> list[RequestRecord]:
        """Send everything, and return `records`, which also has what there is when this is cancelled."""
        self._client.start_clock()
        async with asyncio.TaskGroup() as group:
            if self._load.rate is not None:
                await self._send_by_time(group, self._load.rate)
            else:
                numbers = self._numbers()
                for _ in range(self._load.concurrency or 1):
                    group.create_task(self._send_in_turn(numbers))
        return self.records

    async def _send_by_time(self, group: asyncio.TaskGroup, rate: float) -> None:
        for number, due_s in zip(self._numbers(), arrivals(rate, self._seed), strict=False):
            if self._is_over(due_s):
                return
            conversation = self._conversation(number)
            await asyncio.sleep(due_s - self._client.now_s())
            group.create_task(self._converse(conversation, due_s))

    async def _send_in_turn(self, numbers: Iterator[int]) -> None:
        """One of the `concurrency`: conversation after conversation. All of them share the numbers."""
        for number in numbers:
            conversation = self._conversation(number)
            now_s = self._client.now_s()
            if self._is_over(now_s):
                return
            await self._converse(conversation, now_s)

    async def _converse(self, conversation: Conversation, due_s: float) -> None:
        """Ask turn by turn, each with all that was said before. A failed turn ends the conversation."""
        history = History(self._options)
        for number, turn in enumerate(conversation.turns):
            record = RequestRecord(
                conversation=conversation.index,
                turn=number,
                scheduled_s=due_s,
                sent_s=due_s,
                end_s=due_s,
                max_tokens=turn.max_tokens,
            )
            prompt = history.prompt_with(turn)
            record, answer = await self._client.ask(self._options, prompt, turn.max_tokens, record)
            self.records.append(record)
            self._on_record(record)
            due_s = record.end_s + self._load.think_s
            if record.error is not None or number + 1 == len(conversation.turns) or self._is_over(due_s):
                return
            history.answered(answer)
            await asyncio.sleep(due_s - self._client.now_s())

    def _numbers(self) -> Iterator[int]:
        """The conversations to hold, by number; endless where only time ends the load."""
        number = 0
        while self._load.requests is None or number * self._turns < self._load.requests:
            yield number
            number += 1

    def _conversation(self, number: int) -> Conversation:
        """The last one is cut to the number of requests."""
        conversation = self._source.conversation(number)
        if self._load.requests is None:
            return conversation
        left = self._load.requests - number * self._turns
        return msgspec.structs.replace(conversation, turns=conversation.turns[:left])

    def _is_over(self, due_s: float) -> bool:
        return self._load.duration_s is not None and due_s >= self._load.duration_s


class History:
    """What was said so far, in the form of the endpoint."""

    def __init__(self, options: RequestOptions) -> None:
        self._is_chat = options.endpoint == "chat"
        self._messages: list[dict[str, str]] = []
        self._text = ""

    def prompt_with(self, turn: Turn) -> Prompt:
        """Add the turn and return the whole prompt. Token ids stand alone: they have no later turns."""
        if turn.ids is not None:
            return turn.ids
        if self._is_chat:
            self._messages.append({"role": "user", "content": turn.text})
            return list(self._messages)
        self._text = f"{self._text} {turn.text}" if self._text else turn.text
        return self._text

    def answered(self, text: str) -> None:
        self._messages.append({"role": "assistant", "content": text})
        self._text += text
