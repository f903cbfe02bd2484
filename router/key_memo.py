"""The block keys of prompts that were hashed a moment ago: all choices of one prompt ask for the same, and so does the
next attempt of a request that lost its engine.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from engine.protocol import GenerateRequest
from kvstore.keys import KeyChain

MAX_PROMPTS = 256
MAX_KEYS = 65_536
"""Over all prompts that are remembered: about 5 MB."""


@dataclass(frozen=True, slots=True)
class _Remembered:
    """`identity` is what has to be equal for the keys to be those of another request."""

    identity: tuple[bytes, int, int]
    keys: Sequence[bytes]


class KeyMemo:
    """By group, whose requests have one prompt. The least recently used are forgotten first; one prompt that has more
    keys than there is room for is hashed each time."""

    def __init__(self, max_prompts: int = MAX_PROMPTS, max_keys: int = MAX_KEYS) -> None:
        self._max_prompts = max_prompts
        self._max_keys = max_keys
        self._prompts: OrderedDict[str, _Remembered] = OrderedDict()
        self._num_keys = 0

    @property
    def num_keys(self) -> int:
        """Keys that are remembered."""
        return self._num_keys

    def keys(self, request: GenerateRequest, block_size: int) -> Sequence[bytes]:
        """Return the chain of keys of the request's prompt and what it resumes. The caller does not change it."""
        keys = self._of_prompt(request, block_size)
        if not request.resume_ids:
            return keys
        chain = KeyChain(request.cache_scope, block_size)
        chain.keys.extend(keys)
        return chain.extend([*request.prompt_ids, *request.resume_ids])

    def _of_prompt(self, request: GenerateRequest, block_size: int) -> Sequence[bytes]:
        group = request.group_id
        # An id that somebody uses again for another prompt must not get this one's keys.
        identity = (request.cache_scope, block_size, len(request.prompt_ids))
        if group is not None and (known := self._prompts.get(group)) is not None and known.identity == identity:
            self._prompts.move_to_end(group)
            return known.keys
        keys = KeyChain(request.cache_scope, block_size).extend(request.prompt_ids)
        if group is not None:
            self._remember(group, _Remembered(identity, keys))
        return keys

    def _remember(self, group: str, prompt: _Remembered) -> None:
        if (old := self._prompts.pop(group, None)) is not None:
            self._num_keys -= len(old.keys)
        self._prompts[group] = prompt
        self._num_keys += len(prompt.keys)
        while len(self._prompts) > self._max_prompts or self._num_keys > self._max_keys:
            _, oldest = self._prompts.popitem(last=False)
            self._num_keys -= len(oldest.keys)
