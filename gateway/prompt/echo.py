"""Prompt echo: return all of a prompt or its last tokens (`echo_last`)."""

from collections.abc import Callable, Sequence

from contract.pieces import REPLACEMENT
from gateway.dialects.request import GenerationRequest

CONTEXT_TOKENS = 16
"""Tokens before the echoed ones that are decoded with them: a token's text may depend on them."""


def echoed_text(
    request: GenerationRequest,
    *,
    text: str | None,
    token_ids: Sequence[int],
    decode: Callable[[list[int]], str],
) -> str:
    """Return the text that precedes every choice of one prompt.

    `text` is the client's prompt, or None for token ids; `decode` shows special tokens. If the
    first echoed token completes a character, the echo includes the whole character.
    """
    last = request.echo_last
    if not request.echo or last == 0:
        return ""
    if last is None or last >= len(token_ids):
        return text if text is not None else decode(list(token_ids))
    context = list(token_ids[-last - CONTEXT_TOKENS : -last])
    shown = decode([*context, *token_ids[-last:]])
    while context and decode(context).endswith(REPLACEMENT):
        context.pop()
    return shown[len(decode(context)) :]
