"""The list of models in the form that OpenRouter reads from the providers that sell through it."""

from collections.abc import Mapping
from decimal import Decimal
from typing import Any, Final

from contract.messages import Feature
from contract.tier import ServiceTier
from gateway.errors import StoreUnavailableError

_SAMPLING: Final = (
    *("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty"),
    *("repetition_penalty", "stop", "seed", "max_tokens", "logit_bias"),
)
_FEATURES: Final[Mapping[str, tuple[str, ...]]] = {
    Feature.TOOLS: ("tools",),
    Feature.STRUCTURE: ("json_mode", "structured_outputs"),
    Feature.REASONING: ("reasoning",),
}
_PRICE_DIGITS: Final = 12
"""Prices are in micro-dollars per million tokens, and here in dollars per token."""


def openrouter_body(
    body: Mapping[str, Any], details: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the body of a model as OpenRouter has it, with the operator's `details` by model.

    Raises StoreUnavailableError while prices are unknown.
    """
    if body["pricing"] is None:
        raise StoreUnavailableError("Prices are unknown at the moment.")
    prices, features = body["pricing"][ServiceTier.DEFAULT], body["features"]
    served = {*body["supported_chat_parameters"], *body["supported_parameters"]}
    return {
        "id": body["id"],
        "name": body["id"],
        "created": body["created"],
        "input_modalities": ["text", *["image"] * (Feature.IMAGES in features)],
        "output_modalities": ["text"],
        "context_length": body["context_window"],
        "max_output_length": body["context_window"],
        "pricing": {
            "prompt": _price(prices["prompt_micros"]),
            "completion": _price(prices["completion_micros"]),
            "input_cache_read": _price(prices["cached_micros"]),
            "image": "0",
            "request": "0",
        },
        "supported_sampling_parameters": [name for name in _SAMPLING if name in served],
        "supported_features": [
            *(name for feature in _FEATURES if feature in features for name in _FEATURES[feature]),
            "logprobs",
        ],
        "is_ready": body["ready"],
        **details.get(body["id"], {}),
    }


def _price(micros: int) -> str:
    return f"{Decimal(micros).scaleb(-_PRICE_DIGITS).normalize():f}"
