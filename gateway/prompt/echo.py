"""What is echoed of a prompt: all of it, or its last tokens (`echo_last`)."""

from collections.abc import Callable, Sequence

from gateway.dialects.request import GenerationRequest

REPLACEMENT = "\ufffd"
"""What bytes read as that are no complete character."""

CONTEXT_TOKENS = 16
"""Tokens before the echoed ones that are decoded with them, because the text of a token may depend on
those before it."""


def echoed_text(
    request: GenerationRequest,
    *,
    text: str | None,
    token_ids: Sequence[int],
    decode: Callable[[list[int]], str],
) -> str:
    """Return the text that stands before every choice of one prompt.

    `text` is what the client sent, None for token ids; `decode` shows special tokens. What the first
    echoed token completes, a character as a rule, is echoed as a whole.
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
