"""Stream options, timings, service tier and cache parameters of a request."""

from collections.abc import Mapping
from typing import Annotated, Any, Final

from pydantic import Field

from contract.tier import REQUEST_TIERS, ServiceTier
from gateway.dialects.fields import Parameters, agreed, one_of
from gateway.dialects.profile import Profile
from gateway.records.errors import invalid

MAX_ISOLATION_KEY_CHARACTERS = 256
MAX_LABEL_CHARACTERS: Final = 1_024
"""Maximum characters of an id that a response only repeats."""

AUTO_TIER: Final = "auto"
"""OpenAI's value for the account's own tier."""


TIERS: Final = {
    **{tier.value: tier for tier in REQUEST_TIERS},
    "scale": ServiceTier.DEFAULT,
    "fast": ServiceTier.PRIORITY,
    "ultrafast": ServiceTier.PRIORITY,
}
"""The tiers by their names, of which the last ones are those of other vendors."""


class StreamOptions(Parameters):
    """Options of a streamed response."""

    include_usage: bool | None = None
    """Whether to end the stream with an extra chunk that has only `usage`. With false, no chunk has
    `usage`. Default: the final chunk has it."""
    include_obfuscation: bool | None = None
    """Pad chunks so that their size does not reveal the length of their text. Default: false."""
    continuous_usage_stats: bool | None = None
    """Return `usage` in every chunk with a choice: the tokens of that choice so far. No effect if
    `include_usage` is false. Default: false."""


NO_OPTIONS: Final = StreamOptions()


class AccountParameters(Parameters):
    """Who sends a request, and how urgent it is."""

    service_tier: str | None = None
    """Priority of the request, at the tier's price: `flex` (when capacity is free), `default` or
    `priority` (first). `scale` is default; `fast` and `ultrafast` are priority. `auto` and null:
    the account's tier. The response names the tier, unless it is null."""
    user: Annotated[str, Field(max_length=MAX_LABEL_CHARACTERS)] | None = None
    """Id of the client's end user, for abuse tracking."""


class DeliveryParameters(AccountParameters):
    """How the response is delivered."""

    stream: bool | None = None
    """Stream the response as server-sent events. Default: false."""
    background: bool | None = None
    """Run the request in the background: return its id at once, and the completion on a later
    request. With `stream`, stream it, but do not cancel it when the client disconnects. Default:
    false."""
    stream_options: StreamOptions | None = None
    """Options of a stream. Without `stream`, dialects openai, mistralrs and vllm reject them;
    others ignore them."""
    timings_per_token: bool | None = None
    """Return llama.cpp's `timings` in every chunk, except the one with the role of a chat, and in
    whole responses. Default: false."""
    return_progress: bool | None = None
    """Report in a stream, as llama.cpp's `prompt_progress`, when the prompt was processed and how
    much of it was cached. Default: false."""
    perf_metrics_in_response: bool | None = None
    """Return timings in the body: `metrics` in dialect vllm, else `perf_metrics`. Default:
    false."""
    cache_prompt: bool | None = None
    """Whether to reuse cached work of earlier requests with the same prefix. Default: true."""
    prompt_cache_isolation_key: str | None = Field(
        default=None,
        description="Share cached work only between requests of the account with the same key. "
        f"At most {MAX_ISOLATION_KEY_CHARACTERS} characters.",
    )
    cache_salt: str | None = None
    """Another name of `prompt_cache_isolation_key`."""


def read_stream_options(body: DeliveryParameters, profile: Profile) -> StreamOptions:
    """Return the stream options, or the defaults. Raises a BadRequestError."""
    options = body.stream_options
    if options is None:
        return NO_OPTIONS
    if body.stream:
        return options
    if not profile.allows_stream_options_without_stream:
        raise invalid("stream_options", "is only allowed when 'stream' is true.")
    return NO_OPTIONS


def asked_tier(body: Mapping[str, Any]) -> ServiceTier | None:
    """Return the tier that a body names, before it is read; None without a valid one."""
    name = body.get("service_tier")
    return TIERS.get(name) if isinstance(name, str) else None


def read_service_tier(body: AccountParameters) -> str | None:
    """Return the requested tier; None and `auto` request the account's own.

    Raises InvalidParameterError.
    """
    name = body.service_tier
    if name in (None, AUTO_TIER):
        return name
    return TIERS[one_of(name, "service_tier", (AUTO_TIER, *TIERS))]


def read_cache_isolation_key(body: DeliveryParameters, profile: Profile) -> str:
    """Return the key that separates caches within the tenant; empty if there is none.

    Raises InvalidParameterError.
    """
    if body.cache_salt == "" and profile.rejects_empty_values:
        raise invalid("cache_salt", 'must not be empty in this dialect. Given: "".')
    key = agreed(
        prompt_cache_isolation_key=body.prompt_cache_isolation_key, cache_salt=body.cache_salt
    )
    if key is not None and len(key) > MAX_ISOLATION_KEY_CHARACTERS:
        name = "prompt_cache_isolation_key" if body.prompt_cache_isolation_key else "cache_salt"
        raise invalid(
            name,
            f"must have at most {MAX_ISOLATION_KEY_CHARACTERS} characters. Given: {len(key)} "
            "characters.",
        )
    return key or ""
