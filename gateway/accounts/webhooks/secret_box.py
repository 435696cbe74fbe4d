"""Encryption of stored secrets with keys that are not in the database."""

from collections.abc import Sequence

from cryptography.fernet import Fernet, InvalidToken, MultiFernet

from gateway.records.errors import BadRequestError


class SealedSecretError(Exception):
    """A secret was encrypted with a key that this process does not have."""

    def __init__(self) -> None:
        super().__init__("its secret is encrypted with a key that is not in SLUICE_ENCRYPTION_KEYS")


class SecretBox:
    """Encrypts secrets with the first of its keys, and decrypts those encrypted with any of them.

    Args:
        keys: 32 bytes each, as base64; without any, encryption is impossible.
    """

    def __init__(self, keys: Sequence[str] = ()) -> None:
        ciphers = [Fernet(key) for key in keys]
        self._first = ciphers[0] if ciphers else None
        self._all = MultiFernet(ciphers) if ciphers else None

    @property
    def has_key(self) -> bool:
        """Whether secrets can be encrypted."""
        return self._first is not None

    def seal(self, secret: str) -> bytes:
        """Return the secret in encrypted form. Raises BadRequestError without a key."""
        if self._first is None:
            raise BadRequestError(
                "Webhooks cannot be registered: the deployment has no key to encrypt their secrets "
                "(SLUICE_ENCRYPTION_KEYS)."
            )
        return self._first.encrypt(secret.encode())

    def open(self, sealed: bytes) -> str:
        """Return the secret. Raises SealedSecretError."""
        if self._all is None:
            raise SealedSecretError
        try:
            return self._all.decrypt(sealed).decode()
        except InvalidToken:
            raise SealedSecretError from None

    def is_current(self, sealed: bytes) -> bool:
        """Whether a secret is encrypted with the first key."""
        if self._first is None:
            return False
        try:
            self._first.decrypt(sealed)
        except InvalidToken:
            return False
        return True
