"""URLs of servers, and what is told of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.remote.address import Address, TlsFiles, parse_address


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("redis://cache", Address(host="cache")),
        ("valkey://cache:7000/3", Address(host="cache", port=7000, database=3)),
        ("redis://:p%2Fw%40@[::1]:7000", Address(host="::1", port=7000, password="p/w@")),
        ("redis://user:@cache?db=2", Address(host="cache", username="user", database=2)),
        ("rediss://u:p@cache", Address(host="cache", username="u", password="p", tls=TlsFiles())),
        (
            "valkeys://cache/1?ssl_ca_certs=/ca.pem&ssl_certfile=/me.pem&ssl_keyfile=/me.key",
            Address(host="cache", database=1, tls=TlsFiles("/ca.pem", "/me.pem", "/me.key")),
        ),
        ("unix:///run/valkey.sock?db=4", Address(path="/run/valkey.sock", database=4)),
        ("unix://:pw@/run/valkey.sock", Address(path="/run/valkey.sock", password="pw")),
    ],
)
def test_urls_are_read(url: str, address: Address) -> None:
    assert parse_address(url) == address


@pytest.mark.parametrize(
    "url",
    [
        "",
        "cache:6379",
        "http://cache",
        "redis://",
        "redis://:SECRET@",
        "redis://:SEC/RET@cache",
        "redis://:SECRET@cache:port",
        "redis://:SECRET@cache/database",
        "redis://:SECRET@cache/-1",
        "redis://:SECRET@cache/0?ssl_ca_certs=/ca.pem",
        "redis://:SECRET@cache/0?timeout=5",
        "unix://:SECRET@host/run/valkey.sock",
        "unix://",
        "redis://:SECRET@[::1",
        "redis://cache?password_file=/nowhere/at/all",
    ],
)
def test_what_is_no_address_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(ValueError, match="address cannot be used") as refused:
        parse_address(url)
    assert "SEC" not in str(refused.value)
    assert refused.value.__cause__ is None


def test_a_password_may_be_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "password"
    path.write_text("correct horse\n")
    assert parse_address(f"redis://u@cache?password_file={path}").password == "correct horse"
    for wrong in (b"", b"\n", b"x" * 5000, b"\xff\xfe"):
        path.write_bytes(wrong)
        with pytest.raises(ValueError, match="password file"):
            parse_address(f"redis://cache?password_file={path}")


def test_an_address_is_shown_without_its_password() -> None:
    address = parse_address("rediss://user:SECRET@[::1]:7000/3")
    assert str(address) == "rediss://[::1]:7000/3"
    assert "SECRET" not in repr(address)
    assert str(parse_address("unix:///run/valkey.sock?db=4")) == "unix:///run/valkey.sock?db=4"
