"""LoRA adapters: their files in the object store, and the digest that identifies them.

An adapter consists of two files. Both lie in a folder that the adapter's digest names, so a digest
always means the same weights.
"""

import hashlib
from typing import Final

import msgspec

CONFIG_FILE: Final = "adapter_config.json"
WEIGHTS_FILE: Final = "adapter_model.safetensors"
FILES: Final = (CONFIG_FILE, WEIGHTS_FILE)
MAX_CONFIG_BYTES: Final = 64 * 1024
MAX_HEADER_BYTES: Final = 16 * 1024 * 1024
"""Bytes of the header of a safetensors file, which names its tensors."""

LOAD_TOKENS: Final = 1_000
"""Prompt tokens that take about as long as a load. Claims weigh a loaded adapter against them."""

_SALT_CHARACTERS: Final = 32
"""Enough of a digest to separate adapters; `contract.affinity` uses 64 characters of a salt."""

ModuleShapes = dict[str, tuple[int, int]]
"""For each module of a base model that an adapter may change: its output and input features."""

encode_shapes = msgspec.json.Encoder(order="deterministic").encode
decode_shapes = msgspec.json.Decoder(ModuleShapes).decode


def folder_of(digest: str) -> str:
    """Return the folder of an adapter in the object store."""
    return f"adapters/{digest}"


def digest_of(config: bytes, weights_sha256: str) -> str:
    """Return the SHA-256 that identifies an adapter.

    Args:
        config: Content of its configuration file.
        weights_sha256: SHA-256 of its weights file, in hexadecimal digits.
    """
    config_sha256 = hashlib.sha256(config).hexdigest()
    return hashlib.sha256(f"{config_sha256} {weights_sha256}".encode()).hexdigest()


def cache_salt_of(salt: str, digest: str) -> str:
    """Return the salt of a prefix cache that jobs of one adapter share."""
    return f"{salt}.{digest[:_SALT_CHARACTERS]}"
