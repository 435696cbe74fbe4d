"""llama.cpp's own completions: the bodies of `/completion` and `/infill`, and their settings.

They are the body of `POST /v1/completions` without the parameters that llama.cpp's own response has
no place for.
"""

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from contract.sampling import DEFAULT_SAMPLERS, SamplerChain, SamplingSpec
from gateway.dialects.completions import CompletionRequest, to_generation_request
from gateway.dialects.estimate_parameters import chain_parameters
from gateway.dialects.fields import read_boolean, read_list, read_strings
from gateway.dialects.parameters import Endpoints, is_nothing
from gateway.dialects.profile import Profile
from gateway.dialects.request import GenerationRequest, ResponseForm, StructureKind
from gateway.dialects.sampling.chain import with_reported_probabilities
from gateway.dialects.sampling.logit_bias import FORBIDDEN
from gateway.dialects.sampling.parameters import DEFAULT_ETA, DEFAULT_TAU, DEFAULT_XTC_THRESHOLD
from gateway.dialects.unknown_members import OBJECTS
from gateway.dialects.wire import validate
from gateway.records.errors import MissingParameterError, invalid, must

MAX_FILES: Final = 256
MAX_FIELDS: Final = 64
MAX_FIELD: Final = 256
"""Maximum characters of a path in `response_fields`."""
RANDOM_SEED: Final = 2**32 - 1
"""The seed that llama.cpp reports if the request has none."""
NO_NAME: Final = "tmp"
"""The name of a file without one, as in llama.cpp."""

_WITHOUT_EFFECT: Final = frozenset(
    {
        *("echo", "echo_last", "parallel_tool_calls", "perf_metrics_in_response"),
        *("prompt_logprobs", "return_tokens_as_token_ids", "stream_options"),
        *("tool_choice", "tools"),
    }
)
_SAMPLING: Final = (
    *("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty"),
    "ignore_eos",
)
"""Settings that a spec has by their own names."""
_WITHOUT_CHAIN: Final = {
    **chain_parameters(SamplerChain([])),
    "xtc_probability": 0.0,
    "xtc_threshold": DEFAULT_XTC_THRESHOLD,
    "dry_multiplier": 0.0,
    "mirostat": 0,
    "mirostat_tau": DEFAULT_TAU,
    "mirostat_eta": DEFAULT_ETA,
}
"""The settings of a chain whose optional steps are off."""
_POST_SAMPLING: Final = "post_sampling_probs"
_FIELDS: Final = "response_fields"
_OF_INFILL: Final = ("input_prefix", "input_suffix", "input_extra")


def read_native_completion(
    body: dict[str, Any], profile: Profile, *, max_prompts: int
) -> GenerationRequest:
    """Return the request of a body of `POST /completion`. Raises a BadRequestError."""
    dropped = _dropped(body, _WITHOUT_EFFECT)
    rest = {name: value for name, value in body.items() if name not in _WITHOUT_EFFECT}
    is_post = read_boolean(rest.pop(_POST_SAMPLING, None), _POST_SAMPLING)
    fields = read_strings(rest.pop(_FIELDS, None), _FIELDS, most=MAX_FIELDS, longest=MAX_FIELD)
    wire = validate(CompletionRequest, rest)
    request = to_generation_request(wire, profile, max_prompts=max_prompts)
    if is_post and request.logprobs is not None:
        request = _with_probabilities(request)
    elif is_post:
        dropped.append(_POST_SAMPLING)
    ignored = tuple(sorted({*request.ignored_parameters, *dropped}))
    return msgspec.structs.replace(
        request, form=ResponseForm.NATIVE, response_fields=tuple(fields), ignored_parameters=ignored
    )


def read_native_infill(
    body: dict[str, Any], profile: Profile, *, max_prompts: int
) -> GenerationRequest:
    """Return the request of a body of `POST /infill`. Raises a BadRequestError."""
    files, without_effect = _files(body.get("input_extra"))
    # The server of llama.cpp puts the prompt after the prefix, unlike its documentation.
    prefix = _text(body, "input_prefix") + _text(body, "prompt", default="")
    suffix = _text(body, "input_suffix")
    dropped = [*without_effect, *_dropped(body, {"suffix", "images"})]
    rest = {name: value for name, value in body.items() if name not in (*_OF_INFILL, *dropped)}
    request = read_native_completion(
        {**rest, "prompt": prefix, "suffix": None}, profile, max_prompts=max_prompts
    )
    ignored = tuple(sorted({*request.ignored_parameters, *dropped}))
    return msgspec.structs.replace(
        request, suffix=suffix, infill_files=files, ignored_parameters=ignored
    )


def native_settings(
    request: GenerationRequest, sampling: SamplingSpec, *, context_window: int
) -> dict[str, Any]:
    """Return the parameters of a request by llama.cpp's names, with all defaults filled in."""
    structure = request.structure
    is_gbnf = structure is not None and structure.kind is StructureKind.GBNF
    return {
        "n_ctx": context_window,
        "seed": sampling.seed if sampling.is_seed_requested else RANDOM_SEED,
        **{name: getattr(sampling, name) for name in _SAMPLING},
        "repeat_penalty": sampling.repetition_penalty,
        **_WITHOUT_CHAIN,
        **chain_parameters(sampling.chain or SamplerChain(list(DEFAULT_SAMPLERS))),
        "stop": request.stop,
        "max_tokens": request.max_tokens,
        "n_predict": request.max_tokens,
        "stream": request.stream,
        "logit_bias": [
            # JSON has no minus infinity; clients forbid a token with `false`.
            {"token": token, "bias": False if bias == FORBIDDEN else bias}
            for token, bias in sampling.logit_bias.items()
        ],
        "n_probs": request.logprobs or 0,
        "grammar": structure.source if structure is not None and is_gbnf else "",
        "timings_per_token": request.timings_per_token,
        "post_sampling_probs": request.reports_probabilities,
        "lora": [],
    }


def default_settings(profile: Profile, *, context_window: int) -> dict[str, Any]:
    """Return the settings of a completion whose body has nothing but a prompt."""
    request = read_native_completion({"prompt": ""}, profile, max_prompts=1)
    return native_settings(request, request.sampling, context_window=context_window)


def _with_probabilities(request: GenerationRequest) -> GenerationRequest:
    if request.best_of > request.n:
        raise invalid(
            _POST_SAMPLING,
            "cannot be combined with 'best_of', which compares sequences by the model's own "
            "probabilities.",
        )
    sampling = with_reported_probabilities(request.sampling, request.profile)
    return msgspec.structs.replace(request, sampling=sampling)


def _dropped(body: Mapping[str, Any], names: frozenset[str] | set[str]) -> list[str]:
    return [name for name in names & body.keys() if not is_nothing(body[name])]


def _text(body: Mapping[str, Any], name: str, *, default: str | None = None) -> str:
    value = body.get(name)
    if value is None:
        if default is None:
            raise MissingParameterError(name)
        return default
    if not isinstance(value, str):
        raise must(name, "be a string", value)
    return value


def _files(value: object) -> tuple[list[tuple[str, str]], list[str]]:
    """Return names and texts of `input_extra`, and the paths of entries that have no effect."""
    files: list[tuple[str, str]] = []
    ignored: list[str] = []
    for index, item in enumerate(read_list(value, "input_extra", most=MAX_FILES)):
        path = f"input_extra[{index}]"
        if not isinstance(item, dict):
            raise must(path, "be an object", item, param="input_extra")
        values = {"filename": NO_NAME, **{k: v for k, v in item.items() if v is not None}}
        if "text" not in values:
            raise MissingParameterError(f"{path}.text")
        for name in ("filename", "text"):
            if not isinstance(values[name], str):
                raise must(f"{path}.{name}", "be a string", values[name], param="input_extra")
        files.append((values["filename"], values["text"]))
        OBJECTS[Endpoints.COMPLETIONS]["input_extra[]"].check(item, path, ignored)
    return files, ignored
