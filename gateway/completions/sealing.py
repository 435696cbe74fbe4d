"""Sealed reasoning: reasoning that a client keeps and sends back, but can neither read nor change.

Clients of Messages and Responses return the reasoning of earlier turns only as an opaque text
(`signature`, `encrypted_content`). It contains the reasoning, encrypted with AES-256-GCM and bound
to the tenant and the model. Sealing is deterministic, so every replay of a response is equal: the
nonce is a keyed digest of the request's id, the place in the response and the text.
"""

import base64
import binascii
import hmac
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from common.not_none import not_none
from gateway.dialects.parameters import MAX_NAMED
from gateway.dialects.request import GenerationRequest, Sealed

Seal = Callable[[str, int], str]
"""Seals the reasoning at a place of one response."""

_NONCE_BYTES: Final = 16
_TAG_BYTES: Final = 16
_VERSION: Final = b"\x01"
_PURPOSE: Final = b"sluice reasoning"


class Sealer:
    """Seals reasoning with the first secret of the deployment, and opens it with any of them."""

    def __init__(self, secrets: Sequence[str]) -> None:
        self._keys = [hmac.digest(each.encode(), _PURPOSE, "sha256") for each in secrets]

    def seal_of(
        self, request_id: str, request: GenerationRequest, *, tenant_id: str
    ) -> Seal | None:
        """Return a function that seals the reasoning of one response; None if none is sealed."""
        if not request.sealed_for:
            return None
        owner, key = _owner(tenant_id, request.sealed_for), self._keys[0]

        def seal(text: str, place: int) -> str:
            content = text.encode()
            nonce = _digest(key, request_id.encode(), b"%d" % place, content)[:_NONCE_BYTES]
            sealed = _cipher(key, nonce).encrypt(nonce[:12], content, owner)
            return base64.b64encode(_VERSION + nonce + sealed).decode()

        return seal

    def open(self, sealed: str, *, tenant_id: str, model: str) -> str | None:
        """Return the reasoning; None if it was not sealed here for this tenant and model."""
        try:
            content = base64.b64decode(sealed, validate=True)
        except (binascii.Error, ValueError):
            return None
        start = len(_VERSION) + _NONCE_BYTES
        if not content.startswith(_VERSION) or len(content) < start + _TAG_BYTES:
            return None
        nonce, owner = content[len(_VERSION) : start], _owner(tenant_id, model)
        for key in self._keys:
            try:
                return _cipher(key, nonce).decrypt(nonce[:12], content[start:], owner).decode()
            except InvalidTag:
                continue
        return None

    def opened(
        self, request: GenerationRequest, *, tenant_id: str, model: str
    ) -> GenerationRequest:
        """Return a request with the reasoning of its messages opened.

        What cannot be opened is dropped, and named as ignored by its place.
        """
        chat = not_none(request.chat)
        if not any("sealed" in each for each in chat.messages):
            return request
        messages, dropped = [], list[str]()
        for message in chat.messages:
            read, texts = {**message}, list[str]()
            for part in read.pop("sealed", ()):
                text = part
                if isinstance(part, Sealed):
                    text = self.open(part.text, tenant_id=tenant_id, model=model)
                if text is None:
                    dropped.append(part.place)
                else:
                    texts.append(text)
            if texts:
                read |= dict.fromkeys(("reasoning", "reasoning_content"), "\n".join(texts))
            messages.append(read)
        return msgspec.structs.replace(
            request,
            chat=replace(chat, messages=messages),
            ignored_parameters=tuple(sorted({*request.ignored_parameters, *dropped[:MAX_NAMED]})),
        )


def _owner(tenant_id: str, model: str) -> bytes:
    return msgspec.json.encode([tenant_id, model])


def _digest(key: bytes, *parts: bytes) -> bytes:
    return hmac.digest(key, msgspec.msgpack.encode(parts), "sha256")


def _cipher(key: bytes, nonce: bytes) -> AESGCM:
    # A key of its own for each text, so that no number of texts exhausts AES-GCM's bounds.
    return AESGCM(_digest(key, nonce))
