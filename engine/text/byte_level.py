"""GPT-2's alphabet: 256 printable characters that stand for the 256 bytes in byte-level vocabularies."""

from __future__ import annotations


def _alphabet() -> dict[str, int]:
    """Printable Latin-1 stands for itself; the other bytes, in order, are U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


BYTE_OF = _alphabet()


def piece_bytes(piece: str) -> bytes:
    """Return the bytes that a vocabulary entry stands for; one with foreign characters stands for itself."""
    try:
        return bytes([BYTE_OF[char] for char in piece])
    except KeyError:
        return piece.encode()
