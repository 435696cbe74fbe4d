"""Token pieces: the text or bytes of single tokens, which may be incomplete characters."""

import re
from functools import lru_cache

from tokenizers import Tokenizer

REPLACEMENT = "\ufffd"
"""The decoded text of bytes that are not a complete character."""
_SPACE = "▁"
"""SentencePiece's form of a space."""
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
"""SentencePiece's form of a byte that no other token contains."""


class PieceReader:
    """Returns the text or bytes that a token adds to a text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        decoder = tokenizer.decoder
        rules = "" if decoder is None else decoder.__getstate__().decode()
        self._tokenizer = tokenizer
        self._is_byte_level = '"ByteLevel"' in rules
        self._has_spaces = _SPACE in rules or '"Metaspace"' in rules
        self._added = {
            token_id: str(token.content)
            for token_id, token in tokenizer.get_added_tokens_decoder().items()
        }

    def read(self, token_id: int) -> str | list[int]:
        """Return the token's text, or its bytes if they are not valid text on their own."""
        content = self.bytes_of(token_id)
        try:
            return content.decode()
        except UnicodeDecodeError:
            return list(content)

    def bytes_of(self, token_id: int) -> bytes:
        """Return the token's bytes."""
        added = self._added.get(token_id)
        if added is not None:
            return added.encode()
        # Some models have more ids than their tokenizer has tokens; the extra ids have no text.
        token = self._tokenizer.id_to_token(token_id) or ""
        if self._is_byte_level:
            try:
                return token.translate(_byte_of_letter()).encode("latin-1")
            except UnicodeEncodeError:
                return token.encode()
        if self._has_spaces:
            byte = _BYTE.fullmatch(token)
            return bytes.fromhex(byte[1]) if byte else token.replace(_SPACE, " ").encode()
        return str(self._tokenizer.decode([token_id], skip_special_tokens=False)).encode()


@lru_cache(maxsize=1)
def _byte_of_letter() -> dict[int, int]:
    """Return the byte for each letter of byte-level tokens.

    A byte with a visible Latin-1 character is written as this character, the other bytes as the
    characters from 256 on.
    """
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {byte: byte for byte in visible} | {
        256 + place: byte for place, byte in enumerate(hidden)
    }
