"""`logit_bias` in all its forms, and the lists of allowed and forbidden tokens and words."""

import math
import re
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from contract.sampling import (
    LOGIT_BIAS,
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_CHARACTERS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS_ENTRIES,
)
from gateway.dialects.fields import (
    Parameters,
    check_length,
    number,
    read_strings,
    read_token_id,
    read_token_ids,
    typed,
)
from gateway.dialects.json_types import schema_of
from gateway.records.errors import invalid, must, shown

MAX_BIAS_TEXT_CHARACTERS = 128
FORBIDDEN = -math.inf

_INTEGER_KEY = re.compile(rf"-?[0-9]{{1,{MAX_BIAS_TEXT_CHARACTERS}}}")
_BIAS = schema_of("float | False")
_PAIR = {
    "type": "array",
    "prefixItems": [schema_of("int[0:] | str[1:]"), _BIAS],
    "minItems": 2,
    "maxItems": 2,
}
_MOST = f":{MAX_LOGIT_BIAS_ENTRIES}"


class TokenChoiceParameters(Parameters):
    """Tokens that are allowed, forbidden or preferred."""

    logit_bias: Any = Field(
        default=None,
        description="An object of token ids and biases, which are added to the logits; false "
        f"forbids a token. Biases are clamped to {LOGIT_BIAS.minimum:g} and "
        f"{LOGIT_BIAS.maximum:g}. A key that is no integer is a text, and all its tokens are "
        "biased. Or a list of pairs [id or text, bias].",
        json_schema_extra=schema_of(
            f"dict[str, bias, {_MOST}] | list[pair, {_MOST}] | None", bias=_BIAS, pair=_PAIR
        ),
    )
    allowed_token_ids: Annotated[Any, typed(f"list[int[0:], :{MAX_ALLOWED_TOKEN_IDS}] | None")] = (
        None
    )
    """The only tokens that may be generated. Default: all."""
    bad_words: Annotated[
        Any, typed(f"list[str[1:{MAX_BAD_WORD_CHARACTERS}], :{MAX_BAD_WORDS}] | None")
    ] = None
    """Words that may not be generated, at the start of a word or inside one."""


@dataclass(frozen=True, slots=True)
class LogitBias:
    """Biases by token id, and by texts that only the tokenizer can convert to tokens."""

    ids: dict[int, float]
    texts: dict[str, float]


def read_logit_bias(value: object) -> LogitBias:
    """Return the biases; the last one for a token wins. Raises InvalidParameterError."""
    if value is None:
        return LogitBias({}, {})
    if not isinstance(value, dict | list):
        raise must("logit_bias", "be an object or an array of pairs", value)
    if len(value) > MAX_LOGIT_BIAS_ENTRIES:
        raise must("logit_bias", f"have at most {MAX_LOGIT_BIAS_ENTRIES} entries", len(value))
    bias = LogitBias({}, {})
    if isinstance(value, dict):
        # Keys of a JSON object are strings. int() would also accept "1_0" and " 7", and it rejects
        # numbers with thousands of digits.
        for key, given in value.items():
            _add(bias, int(key) if _INTEGER_KEY.fullmatch(key) else key, given)
    else:
        for entry in value:
            if not isinstance(entry, list) or len(entry) != 2:
                raise must("logit_bias", "have pairs of a token id or text and a bias", entry)
            _add(bias, entry[0], entry[1])
    return bias


def _add(bias: LogitBias, token: object, given: object) -> None:
    value = _bias(given, token)
    if isinstance(token, str):
        check_length(token, "logit_bias", longest=MAX_BIAS_TEXT_CHARACTERS)
        bias.texts[token] = value
    else:
        bias.ids[read_token_id(token, "logit_bias")] = value


def _bias(given: object, token: object) -> float:
    if given is False:
        return FORBIDDEN
    value = number(given)
    if value is None:
        raise invalid(
            "logit_bias",
            f"must have numbers or false as biases. Given: {shown(given)} for {shown(token)}.",
        )
    return min(max(value, LOGIT_BIAS.minimum), LOGIT_BIAS.maximum)


def read_allowed_token_ids(value: object, bias: LogitBias) -> list[int]:
    """Return the only allowed tokens, or an empty list if all are allowed.

    Raises InvalidParameterError if none is left.
    """
    if value is None:
        return []
    allowed = read_token_ids(value, "allowed_token_ids", most=MAX_ALLOWED_TOKEN_IDS)
    if not allowed:
        raise must("allowed_token_ids", "have at least one token id", [])
    if all(bias.ids.get(token) == FORBIDDEN for token in allowed):
        raise must("allowed_token_ids", "have at least one token that 'logit_bias' allows", allowed)
    return allowed


def read_bad_words(value: object) -> list[str]:
    """Return the forbidden words. Raises InvalidParameterError."""
    words = read_strings(value, "bad_words", most=MAX_BAD_WORDS, longest=MAX_BAD_WORD_CHARACTERS)
    for word in words:
        # The engine strips words before it tokenizes them.
        if word.isspace():
            raise must("bad_words", "have words with visible characters", word)
    return words
