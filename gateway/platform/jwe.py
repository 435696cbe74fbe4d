"""JSON Web Encryption (RFC 7516) by a customer's public key."""

from typing import Final

from joserfc import jwe
from joserfc.errors import JoseError
from joserfc.jwk import ECKey, RSAKey

_ALGORITHMS: Final = {"RSA": "RSA-OAEP-256", "EC": "ECDH-ES"}
_CONTENT: Final = "A256GCM"
LEAST_RSA_BITS: Final = 2048


def public_key(pem: str) -> RSAKey | ECKey:
    """Return a public key in PEM. Raises ValueError if it is none, or too short."""
    if "PRIVATE" in pem:
        raise ValueError("It is a private key, which must stay with its owner.")
    for kind in (RSAKey, ECKey):
        try:
            key = kind.import_key(pem)
        except (ValueError, TypeError, JoseError):
            continue
        if isinstance(key, RSAKey) and key.public_key.key_size < LEAST_RSA_BITS:
            raise ValueError(f"It has {key.public_key.key_size} bits.")
        return key
    raise ValueError("It is no public key of RSA or of an elliptic curve in PEM.")


def encrypted(pem: str, content: bytes) -> bytes:
    """Return a JWE in compact form, which only the owner of the private key can read."""
    key = public_key(pem)
    header = {"alg": _ALGORITHMS[key.key_type], "enc": _CONTENT}
    return jwe.encrypt_compact(header, content, key, algorithms=[*header.values()]).encode()
