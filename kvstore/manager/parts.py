"""The objects that a model's blocks are cut into, and their keys."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.layout import TARGET_BYTES, GroupLayout, ObjectLayout
from kvstore.namespace import GroupShape, Namespace
from kvstore.object_key import ObjectKey
from kvstore.quick_check import QuickCheck


class BlockParts:
    """One namespace's cut. An object never spans blocks here: a prompt is found up to its last full block, however thin
    the model's KV is.

    `full` are the objects of groups of which a prompt needs every block, `sliding` those of windows, of which it needs
    the last `depths[group]` blocks. `all` are both, with the check of each in `checks`.
    """

    def __init__(self, namespace: Namespace, target_bytes: int = TARGET_BYTES) -> None:
        self.digest = namespace.digest
        self.block_size = namespace.block_size
        self.full: list[ObjectLayout] = []
        self.sliding: list[ObjectLayout] = []
        self.depths: dict[int, int] = {}
        for group, shape in enumerate(namespace.groups):
            layouts = GroupLayout(namespace, group, target_bytes=target_bytes, max_span=1).parts(1)
            if (window := _window_of(shape)) is None:
                self.full += layouts
            else:
                self.sliding += layouts
                self.depths[group] = -(-window // self.block_size)
        self.all = [*self.full, *self.sliding]
        self._numbers = {id(layout): number for number, layout in enumerate(self.all)}
        self.checks = [QuickCheck(layout) for layout in self.all]
        self.block_bytes = sum(layout.object_bytes for layout in self.all)

    def keys(self, owner: bytes, blocks: Sequence[bytes], layouts: Sequence[ObjectLayout]) -> list[ObjectKey]:
        """Return the keys of `layouts` of each block in turn."""
        return [layout.key(self.digest, owner, block) for block in blocks for layout in layouts]

    def number(self, layout: ObjectLayout) -> int:
        """Return the place of one of `all` in it."""
        return self._numbers[id(layout)]

    def needed(self, index: int, end: int) -> list[ObjectLayout]:
        """Return the objects of block `index` that a prompt of `end` cached blocks needs."""
        return [*self.full, *(one for one in self.sliding if index >= end - self.depths[one.group])]


def _window_of(shape: GroupShape) -> int | None:
    return shape.window_tokens if shape.kind == "sliding_window" else None
