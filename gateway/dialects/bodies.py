"""Parameters and checks that completion and chat bodies share."""

from typing import Any

import msgspec
from pydantic import Field

from contract.sampling import SamplingSpec
from gateway.dialects.lengths import (
    LengthParameters,
    read_min_tokens,
    read_repetition_detection,
    read_stop_token_ids,
)
from gateway.dialects.parameters import unread
from gateway.dialects.profile import Profile
from gateway.dialects.request import GenerationRequest
from gateway.dialects.sampling.chain import read_sampling
from gateway.dialects.sampling.chain_parameters import ChainParameters
from gateway.dialects.sampling.logit_bias import (
    LogitBias,
    TokenChoiceParameters,
    read_allowed_token_ids,
    read_bad_words,
)
from gateway.dialects.stream_options import DeliveryParameters
from gateway.dialects.structured.structured_outputs import unknown_options
from gateway.dialects.structured.structures import StructureParameters
from gateway.errors import InvalidParameterError, MissingParameterError, shown


class SharedParameters(
    DeliveryParameters,
    StructureParameters,
    TokenChoiceParameters,
    ChainParameters,
    LengthParameters,
):
    """Parameters with the same meaning in completions and chats."""

    model: str | None = Field(
        default=None,
        description="The model, from `GET /v1/models`. Required in dialects openai, fireworks and "
        "omlx; in others, the account's default model is used if absent.",
    )


def read_model(value: object, profile: Profile) -> str | None:
    """Return the requested model, or None for the default model. Raises a BadRequestError."""
    if value is None:
        if profile.is_model_required:
            raise MissingParameterError("model")
        return None
    if not isinstance(value, str):
        raise InvalidParameterError(
            f"'model' must be a string. Given: {shown(value)}.", param="model"
        )
    return value


def require_model(body: dict[str, Any], profile: Profile) -> str | None:
    """Return the model that a body requests, before the rest of the body is validated.

    None means the tenant's default model. Raises a BadRequestError.
    """
    return read_model(body.get("model"), profile)


def read_whole_sampling(
    body: SharedParameters, profile: Profile, bias: LogitBias, *, max_tokens: int
) -> SamplingSpec:
    """Return the whole sampling spec, including what ends the text. Raises a BadRequestError."""
    return msgspec.structs.replace(
        read_sampling(body, profile),
        logit_bias=bias.ids,
        ignore_eos=bool(body.ignore_eos),
        min_tokens=read_min_tokens(body, max_tokens=max_tokens),
        stop_token_ids=read_stop_token_ids(body),
        allowed_token_ids=read_allowed_token_ids(body.allowed_token_ids, bias),
        bad_words=read_bad_words(body.bad_words),
        repetition_detection=read_repetition_detection(body),
    )


def shared_extra(body: SharedParameters) -> list[str]:
    """Return the paths of entries in shared parameters that have no effect here."""
    ignored: list[str] = []
    if (options := body.stream_options) is not None:
        ignored += unread(options.model_extra, path="stream_options.")
        if options.continuous_usage_stats and options.include_usage is False:
            ignored.append("stream_options.continuous_usage_stats")
    if (detection := body.repetition_detection) is not None:
        ignored += unread(detection.model_extra, path="repetition_detection.")
    if body.return_progress and not body.stream:
        ignored.append("return_progress")
    ignored += unread(unknown_options(body.structured_outputs), path="structured_outputs.")
    return ignored


def check_end_is_free(request: GenerationRequest) -> None:
    """Raise InvalidParameterError for parameters that conflict with the end of constrained text."""
    constraint = _constraint(request)
    if constraint is None:
        return
    ends = "constrained text ends as soon as it is complete."
    for name, is_given, why in (
        ("ignore_eos", request.sampling.ignore_eos, ends),
        ("min_tokens", request.sampling.min_tokens > 0, ends),
        (
            "allowed_token_ids",
            bool(request.sampling.allowed_token_ids),
            "the allowed tokens may not suffice to complete the text.",
        ),
    ):
        if is_given:
            raise InvalidParameterError(
                f"'{name}' cannot be combined with '{constraint}': {why}", param=name
            )


def _constraint(request: GenerationRequest) -> str | None:
    """Return the parameter that constrains the text, or None."""
    if request.structure is not None:
        return request.structure.param
    is_tool_forced = request.tool_use is not None and request.tool_use.is_constraint
    return request.tools_param if is_tool_forced else None
