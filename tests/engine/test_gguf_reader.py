"""The GGUF reader: values of every supported type, and one clear error for whatever can be wrong with a file."""

from __future__ import annotations

import os
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from engine.errors import ModelError
from engine.loader.gguf import FORMATS, GGUFFile
from engine.loader.gguf_blocks import decode
from engine.loader.gguf_checkpoint import GGUFCheckpoint
from engine.loader.packaged import ensure

ALIGNMENT = 32


def string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def pair(key: str, kind: int, payload: bytes) -> bytes:
    return string(key) + struct.pack("<I", kind) + payload


PAIRS = [
    pair("general.architecture", 8, string("llama")),
    pair("answer", 4, struct.pack("<I", 42)),
    pair("below", 5, struct.pack("<i", -7)),
    pair("large", 10, struct.pack("<Q", 2**40)),
    pair("ratio", 6, struct.pack("<f", 0.5)),
    pair("yes", 7, b"\1"),
    pair("words", 9, struct.pack("<IQ", 8, 2) + string("a") + string("é")),
    pair("numbers", 9, struct.pack("<IQ3h", 3, 3, 1, -2, 3)),
]


def entry(name: str, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    dims = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return string(name) + dims + struct.pack("<IQ", kind, offset)


def gguf_bytes(
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    pairs: list[bytes] = PAIRS,
    entries: list[bytes] | None = None,
    data: bytes | None = None,
    tensor_count: int | None = None,
    pair_count: int | None = None,
) -> bytes:
    if entries is None:
        entries = [entry("first", (4, 2), 0, 0), entry("second", (32,), 8, 32)]
        data = np.arange(8, dtype="<f4").tobytes() + struct.pack("<e32b", 0.5, *range(-16, 16))
    head = magic + struct.pack("<I", version)
    head += struct.pack("<QQ", len(entries) if tensor_count is None else tensor_count, pair_count or len(pairs))
    head += b"".join(pairs) + b"".join(entries)
    return head + bytes(-len(head) % ALIGNMENT) + (data or b"")


def opened(tmp_path: Path, content: bytes) -> GGUFFile:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    return GGUFFile(path)


def test_metadata_and_tensors_are_read_as_written(tmp_path: Path) -> None:
    with opened(tmp_path, gguf_bytes()) as file:
        assert file.metadata == {
            "general.architecture": "llama",
            "answer": 42,
            "below": -7,
            "large": 2**40,
            "ratio": 0.5,
            "yes": True,
            "words": ["a", "é"],
            "numbers": [1, -2, 3],
        }
        first, second = file.tensors["first"], file.tensors["second"]
        assert first.shape == (2, 4)  # GGUF stores the innermost dimension first
        assert decode(file.read("first"), first.format, first.shape).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
        assert decode(file.read("second"), second.format, second.shape).tolist() == [i / 2 for i in range(-16, 16)]


def q4_1_blocks(count: int) -> tuple[bytes, list[float]]:
    rng = np.random.default_rng(0)
    raw, expected = b"", []
    for _ in range(count):
        d, m = (float(np.float16(value)) for value in rng.normal(size=2))
        packed = rng.integers(0, 256, 16)
        raw += struct.pack("<ee", d, m) + bytes(packed.tolist())
        quants = [int(byte) & 15 for byte in packed] + [int(byte) >> 4 for byte in packed]
        expected += [float(np.float32(np.float32(d) * q) + np.float32(m)) for q in quants]
    return raw, expected


def q8_0_blocks(count: int) -> tuple[bytes, list[float]]:
    rng = np.random.default_rng(0)
    raw, expected = b"", []
    for _ in range(count):
        d, quants = float(np.float16(rng.normal())), rng.integers(-128, 128, 32).tolist()
        raw += struct.pack("<e32b", d, *quants)
        expected += [float(np.float32(d) * np.float32(q)) for q in quants]
    return raw, expected


@pytest.mark.parametrize(
    ("kind", "raw", "expected"),
    [
        (0, struct.pack("<2f", 1.25, -3.0), [1.25, -3.0]),
        (1, struct.pack("<2e", 1.25, -3.0), [1.25, -3.0]),
        (30, bytes([0xA0, 0x3F, 0x40, 0xC0]), [1.25, -3.0]),
        (3, *q4_1_blocks(3)),
        (8, *q8_0_blocks(3)),
    ],
    ids=lambda value: FORMATS[value].name if isinstance(value, int) else "",
)
def test_every_supported_type_decodes_to_the_formats_values(kind: int, raw: bytes, expected: list[float]) -> None:
    assert decode(raw, FORMATS[kind], (len(expected),)).tolist() == expected


def with_entry(*entries: bytes, data: bytes = bytes(256)) -> Callable[[], bytes]:
    return lambda: gguf_bytes(entries=list(entries), data=data)


CORRUPT: dict[str, tuple[Callable[[], bytes], str]] = {
    "empty": (lambda: b"", "cannot be read as a GGUF file"),
    "other format": (lambda: gguf_bytes(magic=b"GGML"), "not a GGUF file"),
    "old version": (lambda: gguf_bytes(version=1), "version 1 is not supported"),
    "big endian": (lambda: gguf_bytes(version=0x03000000), "is not supported"),
    "lying tensor count": (lambda: gguf_bytes(tensor_count=2**60), "GGUF file"),
    "lying pair count": (lambda: gguf_bytes(pair_count=2**60), "GGUF file"),
    "unknown value type": (lambda: gguf_bytes(pairs=[pair("x", 99, b"")]), "unknown value type 99"),
    "nested array": (lambda: gguf_bytes(pairs=[pair("x", 9, struct.pack("<IQ", 9, 1) * 2)]), "unknown value type 9"),
    "huge array": (lambda: gguf_bytes(pairs=[pair("x", 9, struct.pack("<IQ", 4, 2**61))]), f"array of {2**61} items"),
    "huge array of strings": (lambda: gguf_bytes(pairs=[pair("x", 9, struct.pack("<IQ", 8, 2**60))]), "array of"),
    "array longer than the file": (lambda: gguf_bytes(pairs=[pair("x", 9, struct.pack("<IQ", 4, 2**20))]), "truncated"),
    "huge string": (lambda: gguf_bytes(pairs=[string("x") + struct.pack("<IQ", 8, 2**63)]), "truncated"),
    "not utf-8": (lambda: gguf_bytes(pairs=[pair("x", 8, struct.pack("<Q", 1) + b"\xff")]), "not UTF-8"),
    "double key": (lambda: gguf_bytes(pairs=[PAIRS[1], PAIRS[1]]), "'answer' appears twice"),
    "bad alignment": (lambda: gguf_bytes(pairs=[pair("general.alignment", 4, struct.pack("<I", 0))]), "alignment"),
    "no dimensions": (with_entry(entry("x", (), 0, 0)), "0 dimensions"),
    "five dimensions": (with_entry(entry("x", (1, 1, 1, 1, 1), 0, 0)), "5 dimensions"),
    "zero size": (with_entry(entry("x", (0, 4), 0, 0)), "shape"),
    "split block": (with_entry(entry("x", (33,), 8, 0)), "shape (33,) in type Q8_0"),
    "overflowing size": (with_entry(entry("x", (2**40, 2**40), 0, 0)), "truncated"),
    "offset past end": (with_entry(entry("x", (4,), 0, 2**62)), "truncated"),
    "unaligned offset": (with_entry(entry("x", (4,), 0, 1)), "unaligned"),
    "double tensor": (with_entry(entry("x", (4,), 0, 0), entry("x", (4,), 0, 0)), "appears twice"),
    "other quantisation": (
        with_entry(entry("x", (256,), 10, 0)),
        "'x' has type Q2_K, which is not supported"
        " (supported: BF16, F16, F32, Q4_0, Q4_1, Q4_K, Q5_0, Q5_1, Q5_K, Q6_K, Q8_0)",
    ),
    "unknown quantisation": (with_entry(entry("x", (256,), 77, 0)), "type number 77"),
}


@pytest.mark.parametrize("case", CORRUPT)
def test_a_corrupt_file_is_refused_in_one_line_that_names_it(tmp_path: Path, case: str) -> None:
    content, message = CORRUPT[case]
    with pytest.raises(ModelError) as caught:
        opened(tmp_path, content())
    assert message in str(caught.value)
    assert str(tmp_path / "model.gguf") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_cut_at_any_byte_is_refused(tmp_path: Path) -> None:
    whole = gguf_bytes()
    for size in range(len(whole)):
        with pytest.raises(ModelError, match=r"truncated|cannot be read|not a GGUF"):
            opened(tmp_path, whole[:size])


def test_a_flipped_byte_never_escapes_the_error_tree(tmp_path: Path) -> None:
    whole = gguf_bytes()
    refused = 0
    for position in range(len(whole)):
        content = bytearray(whole)
        content[position] ^= 0xFF
        try:
            with opened(tmp_path, bytes(content)) as file:
                for name in file.tensors:
                    file.read(name)
        except ModelError:
            refused += 1
    assert refused > 100


def array(key: str, kind: int, count: int, payload: bytes = b"") -> bytes:
    return pair(key, 9, struct.pack("<IQ", kind, count) + payload)


BOMBS = {
    "tensors": (gguf_bytes(tensor_count=2**63), f"{2**63} tensors"),
    "pairs": (gguf_bytes(pair_count=2**40), f"{2**40} key/values"),
    "empty strings": (gguf_bytes(pairs=[array("a", 8, 2**23 + 1)]), "an array of 8388609 items"),
    "bytes of many arrays": (
        gguf_bytes(pairs=[array(str(i), 0, 2**21, bytes(2**21)) for i in range(5)]),
        "an array of 2097152 items",
    ),
    "one string": (gguf_bytes(pairs=[string("a") + struct.pack("<IQ", 8, 2**34)]), "a string of 17179869184 bytes"),
    "one key": (gguf_bytes(pairs=[struct.pack("<Q", 2**34)]), "a string of 17179869184 bytes"),
    "overlap": (
        gguf_bytes(entries=[entry("a", (64,), 0, 0), entry("b", (8,), 0, 224)], data=bytes(256)),
        "tensors 'a' and 'b' overlap",
    ),
    "the same bytes": (
        gguf_bytes(entries=[entry(name, (64,), 0, 0) for name in "abc"], data=bytes(256)),
        "tensors 'a' and 'b' overlap",
    ),
    "a tensor of everything": (gguf_bytes(entries=[entry("a", (2**31, 2**31, 2**31), 0, 0)]), "truncated GGUF file"),
}


@pytest.mark.parametrize("arrays", [True, False])
@pytest.mark.parametrize("case", BOMBS)
def test_a_file_that_claims_without_measure_is_refused_in_little_memory(
    tmp_path: Path, case: str, arrays: bool
) -> None:
    """The file is sparse: by its size it could hold all that it claims."""
    content, message = BOMBS[case]
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    if case != "a tensor of everything":
        os.truncate(path, 1 << 36)
    tracemalloc.start()
    try:
        with pytest.raises(ModelError, match=message):
            GGUFFile(path, arrays=arrays)
        assert tracemalloc.get_traced_memory()[1] < 128 << 20
    finally:
        tracemalloc.stop()


def test_without_arrays_all_else_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_bytes())
    with GGUFFile(path) as whole, GGUFFile(path, arrays=False) as small:
        assert small.metadata == {key: value for key, value in whole.metadata.items() if not isinstance(value, list)}
        assert small.tensors == whole.tensors


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.gguf")
    with pytest.raises(ModelError, match="not a regular file"):
        GGUFFile(tmp_path / "model.gguf")


def test_a_missing_file_is_a_model_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"nothing\.gguf"):
        GGUFFile(tmp_path / "nothing.gguf")


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([], "architecture None is not supported"),
        (
            [pair("general.architecture", 8, string("gemma3"))],
            r"architecture 'gemma3' is not supported \(supported: 'llama', 'qwen2', 'qwen3'\)",
        ),
        (PAIRS[:1], "tensor 'token_embd.weight' is missing"),
        ([*PAIRS[:1], pair("llama.rope.scaling.type", 8, string("yarn"))], "rope scaling 'yarn'"),
        ([*PAIRS[:1], pair("llama.expert_count", 4, struct.pack("<I", 8))], "mixture-of-experts"),
    ],
)
def test_a_model_that_is_not_supported_is_refused_by_name(tmp_path: Path, pairs: list[bytes], message: str) -> None:
    path = tmp_path / "other.gguf"
    path.write_bytes(gguf_bytes(pairs=pairs or PAIRS[1:]))
    with pytest.raises(ModelError, match=message):
        GGUFCheckpoint(path)


def test_the_packaged_model_opens_with_its_shape_and_text() -> None:
    checkpoint = GGUFCheckpoint(ensure("smollm2"))
    config = checkpoint.config
    checkpoint.close()
    assert (config.layers, config.hidden_size, config.heads, config.kv_heads, config.head_dim) == (30, 576, 9, 3, 64)
    assert (config.vocab_size, config.max_positions, config.rope.theta) == (49152, 8192, 100000.0)
    assert config.tied_embeddings
    assert checkpoint.eos_ids == (2,)
    assert not checkpoint.text.add_bos
    assert checkpoint.text.special_tokens["eos_token"] == "<|im_end|>"
    assert len(checkpoint.tensor_names) == 272
