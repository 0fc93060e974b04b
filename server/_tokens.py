"""Secrets and ids that travel as metadata."""

import hashlib
import re
import secrets
from collections.abc import Iterable
from typing import Any

__all__ = ["ATTACH_TOKEN_KEY", "REQUEST_ID_KEY", "TOKEN_KEY", "digest", "metadata_value", "new_token", "request_id"]

TOKEN_KEY = "topkd-token"
ATTACH_TOKEN_KEY = "topkd-attach-token"
REQUEST_ID_KEY = "topkd-request-id"
HEALTH_PREFIX = "/grpc.health.v1.Health/"
_SANE = re.compile(r"[A-Za-z0-9._:@/-]{1,64}")


def new_token() -> str:
    """Returns 256 random bits as text."""
    return secrets.token_urlsafe(32)


def digest(token: str | bytes) -> bytes:
    """Hashes a token: tables are keyed by it, so that a look-up's time says nothing about the secret."""
    return hashlib.sha256(token.encode() if isinstance(token, str) else token).digest()


def metadata_value(metadata: Iterable[Any] | None, key: str) -> str | None:
    """Returns the text value of one metadata key, or None."""
    for name, value in metadata or ():
        if name == key:
            return value if isinstance(value, str) else None
    return None


def request_id(metadata: Iterable[Any] | None) -> str:
    """Returns the caller's request id if it is sane, else a new one."""
    given = metadata_value(metadata, REQUEST_ID_KEY)
    if given is not None and _SANE.fullmatch(given):
        return given
    return secrets.token_hex(8)
