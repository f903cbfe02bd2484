"""API keys: how they are made, written, hashed and recognised. Knows no HTTP and reads no files.

A key is 256 random bits, so one SHA-256 protects it at rest: there is no list of likely keys to try, and a slow hash
(scrypt) would cost every request milliseconds for nothing. Short keys, which people think of, are refused instead. In
memory and on disk only digests are kept.

An entry is `KEY: TENANT` or `sha256:HEX: TENANT`. Environment variables have entries separated by commas or blanks, as
`KEY:TENANT`; there an entry without a tenant belongs to "default".
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable

import msgspec

from engine.errors import ConfigError

PREFIX = "hr-"
HASH_PREFIX = "sha256:"
MIN_KEY_CHARACTERS = 16
MAX_KEY_CHARACTERS = 512
MAX_KEYS = 4096
"""Every request is compared with all of them, at well under a microsecond each."""
DEFAULT_TENANT = "default"

_KEY = re.compile(r"[!-~]+")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")


UNLIMITED = 0
MAX_LIMIT = 10**12


class KeyEntry(msgspec.Struct, frozen=True):
    """`digest` is the hex SHA-256 of a key. The limits are the key's own, UNLIMITED for none, None for the server's."""

    digest: str
    tenant: str
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None


def new_key() -> str:
    return PREFIX + secrets.token_urlsafe(32)


def digest_of(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def hashed_line(entry: KeyEntry) -> str:
    """The entry as a line of a key file."""
    return f"{HASH_PREFIX}{entry.digest}: {entry.tenant}"


def read_entry(key: str, tenant: str, source: str) -> KeyEntry:
    """Return one entry. Raises ConfigError, which names `source` and never shows the key."""
    if not _TENANT.fullmatch(tenant):
        # Not shown: whoever swaps the two writes the key in the tenant's place.
        raise ConfigError(
            f"{source}: the tenant's name is not valid.", hint="Use up to 64 letters, digits, dots, _, @ and -."
        )
    return KeyEntry(read_digest(key, source), tenant)


def read_limit(written: str, name: str, source: str) -> int:
    """Return a limit of a key file: a number, or UNLIMITED for none."""
    if written.strip().lower() in ("none", "null", "~"):
        return UNLIMITED
    if not (written.isascii() and written.isdecimal() and 0 < int(written[:20]) <= MAX_LIMIT):
        raise ConfigError(f"{source}: {name} must be a whole number from 1 to {MAX_LIMIT}, or none.")
    return int(written)


def read_digest(key: str, source: str) -> str:
    """Return the digest of a key that is written out or hashed already."""
    if key.startswith(HASH_PREFIX):
        digest = key.removeprefix(HASH_PREFIX).lower()
        if not _DIGEST.fullmatch(digest):
            raise ConfigError(f"{source}: after {HASH_PREFIX} 64 hexadecimal digits are needed.")
        return digest
    check_strength(key, source)
    return digest_of(key)


def check_strength(key: str, source: str) -> None:
    if not MIN_KEY_CHARACTERS <= len(key) <= MAX_KEY_CHARACTERS or not _KEY.fullmatch(key):
        raise ConfigError(
            f"{source}: a key has {MIN_KEY_CHARACTERS} to {MAX_KEY_CHARACTERS} printable characters without blanks.",
            hint="Make one with `headrace keys new TENANT`.",
        )


def read_variable(text: str, source: str) -> list[KeyEntry]:
    """Return the entries of an environment variable."""
    entries = []
    for number, written in enumerate(text.replace(",", " ").split(), start=1):
        bare = written.removeprefix(HASH_PREFIX)
        key, _, tenant = bare.partition(":")
        hashed = HASH_PREFIX if bare != written else ""
        entries.append(read_entry(hashed + key, tenant or DEFAULT_TENANT, f"{source}, entry {number}"))
    return check_entries(entries, source)


def check_entries(entries: list[KeyEntry], source: str) -> list[KeyEntry]:
    """Refuse too many entries, and a key that stands for two tenants or has two limits."""
    if len(entries) > MAX_KEYS:
        raise ConfigError(f"{source}: {len(entries)} keys are more than the {MAX_KEYS} that are allowed.")
    known: dict[str, KeyEntry] = {}
    for entry in entries:
        first = known.setdefault(entry.digest, entry)
        if first.tenant != entry.tenant:
            raise ConfigError(f"{source}: one key belongs to both {first.tenant} and {entry.tenant}.")
        if first != entry:
            raise ConfigError(f"{source}: one key of {entry.tenant} stands there twice, with different limits.")
    return entries


class KeyRing:
    """The keys that are valid now; immutable."""

    def __init__(self, entries: Iterable[KeyEntry]) -> None:
        self._entries = [(bytes.fromhex(entry.digest), entry) for entry in entries]

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def tenants(self) -> set[str]:
        return {entry.tenant for _, entry in self._entries}

    def find(self, key: bytes) -> KeyEntry | None:
        """Return the key's entry. Takes the same time for every key: all entries are compared, none in part."""
        digest = hashlib.sha256(key).digest()
        found: KeyEntry | None = None
        for known, entry in self._entries:
            if hmac.compare_digest(known, digest):
                found = entry
        return found
