"""Text to tokens and back for clients that ask for just that, in the shapes of vLLM and llama.cpp."""

from typing import Any

from gateway.prompt.pieces import PieceReader
from gateway.prompt.tokenizers import PromptEncoder


def vllm_tokens(
    encoder: PromptEncoder,
    text: str,
    *,
    adds_special_tokens: bool,
    shows_tokens: bool,
    window: int,
) -> dict[str, Any]:
    """Return the ids of a text's tokens, and with `shows_tokens` how the vocabulary writes them."""
    ids = encoder.text_ids(text, adds_special_tokens=adds_special_tokens)
    tokens = [encoder.tokenizer.id_to_token(token) for token in ids] if shows_tokens else None
    return {"count": len(ids), "max_model_len": window, "tokens": ids, "token_strs": tokens}


def llamacpp_tokens(
    encoder: PromptEncoder, text: str, *, adds_special_tokens: bool, shows_pieces: bool
) -> dict[str, Any]:
    """Return the ids of a text's tokens, each with its text or bytes if `shows_pieces`."""
    ids = encoder.text_ids(text, adds_special_tokens=adds_special_tokens)
    if not shows_pieces:
        return {"tokens": ids}
    pieces = PieceReader(encoder.tokenizer)
    return {"tokens": [{"id": token, "piece": pieces.read(token)} for token in ids]}
