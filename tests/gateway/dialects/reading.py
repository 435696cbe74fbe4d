"""Bodies read through the dialects, as the API does it."""

import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from gateway.dialects.completions import read_completion
from gateway.dialects.parameters import RefusedParameter
from gateway.dialects.profile import PROFILES, Dialect, Profile
from gateway.dialects.request import GenerationRequest
from gateway.records.errors import BadRequestError

OPENAI = PROFILES[Dialect.OPENAI]
FIREWORKS = PROFILES[Dialect.FIREWORKS]
FIREWORKS_2026 = PROFILES[Dialect.FIREWORKS_2026]
LLAMACPP = PROFILES[Dialect.LLAMACPP]
LLAMACPP_2026 = PROFILES[Dialect.LLAMACPP_2026]
MISTRALRS = PROFILES[Dialect.MISTRALRS]
OMLX = PROFILES[Dialect.OMLX]
VLLM = PROFILES[Dialect.VLLM]

EVERY_PROFILE = [pytest.param(profile, id=profile.name) for profile in PROFILES.values()]


def read_body(
    body: dict[str, Any], profile: Profile = OPENAI, *, max_prompts: int = 1024
) -> GenerationRequest:
    """Read a body in a dialect."""
    return read_completion(body, profile, max_prompts=max_prompts)


def read(profile: Profile = OPENAI, /, **parameters: Any) -> GenerationRequest:
    """Read a plain request with these parameters in a dialect."""
    return read_body({"model": "m", "prompt": "x"} | parameters, profile)


def refusal(profile: Profile = OPENAI, /, **parameters: Any) -> BadRequestError:
    """Return why a request with these parameters is refused."""
    with pytest.raises(BadRequestError) as caught:
        read(profile, **parameters)
    assert caught.value.content()
    return caught.value


def unsupported(name: str, value: Any, row: RefusedParameter) -> str:
    """Return the message for a parameter that is not served, or not with every value."""
    given = json.dumps(value, separators=(",", ":"))
    if not row.accepted:
        return f"'{name}' is not supported. {row.reason}"
    return (
        f"'{name}' must be {row.accepted_json}; other values are not supported. Given: {given}. "
        f"{row.reason}"
    )


def at_once(call: Callable[[], Any], *, seconds: float) -> Any:
    """Return the result of `call`, of which one of three runs needs less than `seconds`.

    Only processor time counts. Other programs on the same cores make single runs slower.
    """
    for _ in range(3):
        started = time.process_time()
        result = call()
        if (took := time.process_time() - started) < seconds:
            return result
    raise AssertionError(f"took {took} s")
