"""Where a server is and who asks: read from a URL whose password is shown nowhere."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn
from urllib.parse import parse_qsl, unquote, urlsplit

DEFAULT_PORT = 6379
_TLS = {"redis": False, "valkey": False, "rediss": True, "valkeys": True, "unix": False}
_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
MAX_PASSWORD_BYTES = 4096


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files. Without `authorities` the machine's own are trusted; `certificate` and `key` prove who asks."""

    authorities: str | None = None
    certificate: str | None = None
    key: str | None = None


@dataclass(frozen=True, slots=True)
class Address:
    """A unix socket at `path`, or TCP at `host` and `port`. `tls` None is plain."""

    path: str = ""
    host: str = ""
    port: int = DEFAULT_PORT
    database: int = 0
    username: str = ""
    password: str = field(default="", repr=False)
    tls: TlsFiles | None = None

    def __str__(self) -> str:
        """The place alone: for logs."""
        if self.path:
            return f"unix://{self.path}?db={self.database}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'redis' if self.tls is None else 'rediss'}://{host}:{self.port}/{self.database}"


def parse_address(url: str) -> Address:
    """Return what a URL says:

        redis://[[USER]:PASSWORD@]HOST[:PORT][/DATABASE]     also valkey://
        rediss://...?ssl_ca_certs=FILE&ssl_certfile=FILE&ssl_keyfile=FILE     also valkeys://
        unix://[[USER]:PASSWORD@]/PATH?db=DATABASE

    `password_file=FILE` keeps the password out of the URL. Raises ValueError, which never tells the URL itself.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        # The reason would quote a part of the URL: of a password with a slash in it, for example.
        _refuse("its host or port cannot be read; special characters of a password are written as %XX")
    if parts.scheme not in _TLS:
        _refuse(f"it begins with none of {', '.join(f'{scheme}://' for scheme in _TLS)}")
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    database, password_file = options.pop("db", ""), options.pop("password_file", None)
    files = {name: options.pop(name) for name in _FILES if name in options} if _TLS[parts.scheme] else {}
    if options:
        _refuse(f"it has options that are not known: {', '.join(sorted(options))}")
    is_unix = parts.scheme == "unix"
    if is_unix == bool(host) or (is_unix and len(parts.path) < 2):
        _refuse("a unix socket has a path and no host" if is_unix else "it has no host")
    return Address(
        path=unquote(parts.path) if is_unix else "",
        host=host,
        port=port or DEFAULT_PORT,
        database=_database(database or ("" if is_unix else parts.path.strip("/"))),
        username=unquote(parts.username or ""),
        password=unquote(parts.password or "") if password_file is None else _read_password(Path(password_file)),
        tls=TlsFiles(*(files.get(name) for name in _FILES)) if _TLS[parts.scheme] else None,
    )


def _database(text: str) -> int:
    if not text:
        return 0
    if not text.isdecimal() or len(text) > 6:
        _refuse("its database is no number")
    return int(text)


def _read_password(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_PASSWORD_BYTES + 1)
        password = content.decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        _refuse(f"its password file {path} cannot be read: {getattr(error, 'strerror', None) or 'it is no text'}")
    if not password or len(content) > MAX_PASSWORD_BYTES:
        _refuse(f"its password file {path} holds no password")
    return password


def _refuse(why: str) -> NoReturn:
    raise ValueError(f"the server's address cannot be used: {why}") from None
