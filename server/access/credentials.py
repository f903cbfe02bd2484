"""What the launcher reads once and hands to every API process: keys, admin key and scope secret, as digests and hex.

Keys come from the environment (HEADRACE_API_KEYS, HEADRACE_ADMIN_KEY) or from files, never from flags, which every user
of a machine can read in the process list.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path

import msgspec

from engine.errors import ConfigError
from server.access.key_file import read_key_file, readable_by_others
from server.access.keys import KeyEntry, read_digest, read_variable
from server.access.scope_secret import load_or_make, read_secret, state_dir
from server.config import ServeConfig

KEYS_VARIABLE = "HEADRACE_API_KEYS"
ADMIN_VARIABLE = "HEADRACE_ADMIN_KEY"
STATE_VARIABLE = "HEADRACE_STATE_DIR"
SECRET_VARIABLES = (KEYS_VARIABLE, ADMIN_VARIABLE)


class Credentials(msgspec.Struct, frozen=True, kw_only=True):
    """`keys` are those of the environment, `admin_digests` are of the admin key, `scope_secret` is hex.

    The keys of `api_keys_file` are not in here: each API process watches the file itself.
    """

    keys: tuple[KeyEntry, ...] = ()
    admin_digests: tuple[str, ...] = ()
    scope_secret: str = msgspec.field(default_factory=lambda: secrets.token_hex(32))


def read_credentials(config: ServeConfig, environ: Mapping[str, str]) -> tuple[Credentials, list[str]]:
    """Return the credentials, and warnings. Raises ConfigError."""
    warnings: list[str] = []
    keys = read_variable(environ.get(KEYS_VARIABLE, ""), KEYS_VARIABLE)
    if config.api_keys_file is not None:
        path = Path(config.api_keys_file)
        if not read_key_file(path):
            raise ConfigError(
                f"The key file {path} has no keys: nobody could ask anything.",
                hint="Add a line with `headrace keys new TENANT`.",
            )
        if readable_by_others(path):
            warnings.append(f"{path} can be read by other users. Run: chmod 600 {path}")
    secret, secret_warnings = _scope_secret(config, environ.get(STATE_VARIABLE))
    credentials = Credentials(
        keys=tuple(keys), admin_digests=admin_digests(config.admin_key_file, environ), scope_secret=secret
    )
    return credentials, warnings + secret_warnings


def admin_digests(admin_key_file: str | None, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the digests of the admin's keys. Raises ConfigError."""
    digests = []
    if written := environ.get(ADMIN_VARIABLE, "").strip():
        digests.append(read_digest(written, ADMIN_VARIABLE))
    if admin_key_file is not None:
        path = Path(admin_key_file)
        try:
            written = path.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
            raise ConfigError(f"The admin key file {path} cannot be read: {reason}.") from None
        digests.append(read_digest(written, str(path)))
    return tuple(digests)


def _scope_secret(config: ServeConfig, state: str | None) -> tuple[str, list[str]]:
    if config.scope_secret_file is not None:
        return read_secret(Path(config.scope_secret_file)).hex(), []
    directory = state_dir(state)
    try:
        return load_or_make(directory).hex(), []
    except OSError as error:
        # Caches that live in this server's memory need no more than a secret that lives as long as they do.
        note = (
            f"The scope secret cannot be kept in {directory} ({error.strerror or error}): this run has one of its own."
            f" Set {STATE_VARIABLE} or --scope-secret-file."
        )
        if any(not tier.startswith("ram=") for tier in config.engine.kv_store):
            note += " What the KV store keeps of tenants is not found again after a restart, or by another server."
        return secrets.token_hex(32), [note]
