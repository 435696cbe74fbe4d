"""Tokenization of texts for the tokenize endpoints, in the formats of vLLM and llama.cpp."""

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
    """Return a text's token ids; with `shows_tokens`, also the vocabulary's token strings."""
    ids = encoder.text_ids(text, adds_special_tokens=adds_special_tokens)
    tokens = [encoder.tokenizer.id_to_token(token) for token in ids] if shows_tokens else None
    return {"count": len(ids), "max_model_len": window, "tokens": ids, "token_strs": tokens}


def llamacpp_tokens(
    encoder: PromptEncoder, text: str, *, adds_special_tokens: bool, shows_pieces: bool
) -> dict[str, Any]:
    """Return a text's token ids; with `shows_pieces`, each with its text or bytes."""
    ids = encoder.text_ids(text, adds_special_tokens=adds_special_tokens)
    if not shows_pieces:
        return {"tokens": ids}
    pieces = PieceReader(encoder.tokenizer)
    return {"tokens": [{"id": token, "piece": pieces.read(token)} for token in ids]}
