"""Public keys for JWTs, from a JWKS file that can be replaced while the gateway runs."""

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import jwt
import msgspec

from gateway.errors import StartupError

logger = logging.getLogger(__name__)

CHECK_SECONDS: Final = 1.0
"""Minimum interval between checks whether the file was replaced."""


class JwksError(StartupError):
    """The file cannot be read or contains no usable key."""


class JwksFile:
    """Keys of a JWKS file by their `kid`.

    Args:
        path: the file; it must be readable and contain a usable key when the gateway starts.
        monotonic: clock in seconds.
    """

    def __init__(self, path: Path, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._monotonic = monotonic
        self._checked_at = monotonic()
        self._version = _version(path)
        self._keys = _read(path)

    def get(self, kid: str) -> jwt.PyJWK | None:
        """Return the key with this id from the latest readable version of the file."""
        if self._monotonic() - self._checked_at >= CHECK_SECONDS:
            self._checked_at = self._monotonic()
            self._reload()
        return self._keys.get(kid)

    def _reload(self) -> None:
        try:
            version = _version(self._path)
            if version != self._version:
                self._keys = _read(self._path)
                self._version = version
                logger.info("JWKS file reloaded: %d keys", len(self._keys))
        except JwksError as error:
            # The previous keys stay valid, so a broken file locks out nobody.
            logger.warning(
                "cannot reload the JWKS file, its previous keys remain in use: %s", error
            )


def _version(path: Path) -> tuple[int, int, int]:
    try:
        status = path.stat()
    except OSError as error:
        raise JwksError(f"The JWKS file {path} cannot be read: {error.strerror}.") from error
    return (status.st_mtime_ns, status.st_size, status.st_ino)


def _read(path: Path) -> Mapping[str, jwt.PyJWK]:
    try:
        document = msgspec.json.decode(path.read_bytes(), type=dict[str, list[dict[str, Any]]])
    except OSError as error:
        raise JwksError(f"The JWKS file {path} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise JwksError(f"The JWKS file {path} is not a JSON Web Key Set.") from error
    keys = {key.key_id: key for key in map(_parse, document.get("keys", [])) if key is not None}
    usable = {kid: key for kid, key in keys.items() if isinstance(kid, str)}
    if not usable:
        raise JwksError(f"The JWKS file {path} contains no signature key with a 'kid'.")
    return usable


def _parse(data: dict[str, Any]) -> jwt.PyJWK | None:
    if data.get("use", "sig") != "sig":
        return None
    try:
        return jwt.PyJWK.from_dict(data)
    except jwt.PyJWTError:
        # A set may contain key types that we do not support. Their text may be private, so it is
        # not logged.
        logger.warning("JWKS file: skipped an unusable key")
        return None
