"""Tokenization of texts for the tokenize endpoints, in the formats of vLLM and llama.cpp."""

from collections.abc import Mapping
from typing import Any, Final

from tokenizers import Tokenizer

from contract.messages import WorkerCard
from contract.pieces import PieceReader
from gateway.completions.prompt.chat_templates import DEFAULT
from gateway.completions.prompt.tokenizers import PromptEncoder

TOKENIZER_CLASS: Final = "PreTrainedTokenizerFast"
"""The class of transformers that reads the tokenizer.json of any model."""


def tokenizer_config(
    tokenizer: Tokenizer, card: WorkerCard, templates: Mapping[str, str]
) -> dict[str, Any]:
    """Return the content of tokenizer_config.json, as vLLM returns it: added tokens are texts.

    `templates` are the sources of the model's chat templates by name.
    """
    added = sorted(tokenizer.get_added_tokens_decoder().items())
    config: dict[str, Any] = {
        "tokenizer_class": TOKENIZER_CLASS,
        "model_max_length": card.context_window,
        "added_tokens_decoder": {token_id: token.content for token_id, token in added},
    }
    if card.bos_token_id is not None:
        config["bos_token"] = tokenizer.id_to_token(card.bos_token_id)
    if card.chat is not None:
        config |= card.chat.special_tokens
    if templates:
        config["chat_template"] = (
            templates[DEFAULT]
            if len(templates) == 1
            else [{"name": name, "template": source} for name, source in templates.items()]
        )
    return config


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
