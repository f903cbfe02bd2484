"""The cut of blocks into objects: right sizes, nothing twice, nothing left out."""

from __future__ import annotations

import math

import pytest

from kvstore.layout import HEADER_BYTES, GroupLayout
from kvstore.namespace import DTYPE_BYTES, GroupShape, Namespace

MIB = 1 << 20
SHAPES = {
    "llama-8b": (GroupShape("full", tuple(range(32)), 8, 128), "bfloat16", 64),
    "llama-8b-256": (GroupShape("full", tuple(range(32)), 8, 128), "bfloat16", 256),
    "smollm2": (GroupShape("full", tuple(range(30)), 3, 64), "float32", 64),
    "latent": (GroupShape("latent", tuple(range(61)), 1, 576, planes=("latent",)), "bfloat16", 64),
    "fat-layers": (GroupShape("full", tuple(range(4)), 32, 128), "float32", 256),
    "thin": (GroupShape("compressed", tuple(range(40)), 1, 96, planes=("latent",), ratio=4), "uint8", 64),
    "every-other-layer": (
        GroupShape("sliding_window", tuple(range(0, 26, 2)), 4, 256, window_tokens=512),
        "bfloat16",
        64,
    ),
    "tiny": (GroupShape("full", (0,), 1, 8), "float32", 16),
}


def layout_of(name: str) -> GroupLayout:
    shape, dtype, block_size = SHAPES[name]
    namespace = Namespace(
        model=name, weights_digest="w", kv_dtype=dtype, rope="", groups=(shape,), block_size=block_size, numerics=""
    )
    return GroupLayout(namespace, 0)


@pytest.mark.parametrize("name", SHAPES)
def test_parts_hold_every_value_once(name: str) -> None:
    shape, dtype, block_size = SHAPES[name]
    layout = layout_of(name)
    for span in {1, layout.span}:
        parts = layout.parts(span)
        cells = [
            (plane, layer, head)
            for part in parts
            for plane, layer in ((spec.plane, spec.layer) for spec in part.segments)
            for head in range(part.head_start, part.head_stop)
        ]
        assert sorted(cells) == sorted(
            (p, la, h) for p in shape.planes for la in shape.layers for h in range(shape.kv_heads)
        )
        row = block_size // shape.ratio * shape.head_dim * DTYPE_BYTES[dtype]
        assert sum(part.payload_bytes for part in parts) == span * len(cells) * row


@pytest.mark.parametrize("name", SHAPES)
def test_segments_fill_the_payload_without_gaps(name: str) -> None:
    layout = layout_of(name)
    for part in layout.parts(layout.span):
        at = 0
        for spec in part.segments:
            assert spec.offset == at
            assert spec.size_bytes == math.prod(spec.shape) * DTYPE_BYTES[spec.dtype]
            assert part.layer_start <= spec.layer < part.layer_stop
            at += spec.size_bytes
        assert at == part.payload_bytes
        assert part.header_bytes % HEADER_BYTES == 0


@pytest.mark.parametrize("name", [name for name in SHAPES if name != "tiny"])
def test_objects_are_of_half_to_two_mebibytes(name: str) -> None:
    layout = layout_of(name)
    assert all(MIB // 2 <= part.object_bytes <= 2 * MIB for part in layout.parts(layout.span))


def test_runs_lie_on_a_grid_from_the_first_block() -> None:
    layout = layout_of("thin")
    assert layout.span == 16
    assert layout.runs(37) == [(0, 16), (16, 16), (32, 5)]
    assert layout.runs(0) == []
    with pytest.raises(ValueError, match="span 1 to 16"):
        layout.parts(17)


def test_heads_are_cut_for_engines_that_split_them() -> None:
    shape, dtype, block_size = SHAPES["llama-8b"]
    namespace = Namespace(
        model="m", weights_digest="w", kv_dtype=dtype, rope="", groups=(shape,), block_size=block_size, numerics=""
    )
    layout = GroupLayout(namespace, 0, head_parts=4)
    assert {(part.head_start, part.head_stop) for part in layout.parts(1)} == {(0, 2), (2, 4), (4, 6), (6, 8)}
    with pytest.raises(ValueError, match="equal parts"):
        GroupLayout(namespace, 0, head_parts=3)
