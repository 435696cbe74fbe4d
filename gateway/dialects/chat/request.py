"""Chat completions: the body of `POST /v1/chat/completions` and its `GenerationRequest`.

A chat is a completion whose prompt the model's chat template renders from messages.
`gateway.dialects.bodies` has what chat and completion bodies share; this module combines the topics
of chats.
"""

from typing import Annotated, Any

import msgspec
from pydantic import Field

from gateway.dialects.bodies import SharedParameters, read_shared, shared_extra, with_one_constraint
from gateway.dialects.chat.messages import (
    Conversation,
    MessageParameters,
    check_continued,
    read_messages,
)
from gateway.dialects.chat.template_arguments import (
    TemplateParameters,
    read_continues_last,
    read_template_arguments,
)
from gateway.dialects.chat.thinking import (
    Thinking,
    ThinkingParameters,
    read_thinking,
)
from gateway.dialects.chat.tools import ChatToolParameters, ChatTools, read_chat_tools
from gateway.dialects.choices import read_chat_n, read_logprobs
from gateway.dialects.fields import Parameters
from gateway.dialects.json_types import schema_of
from gateway.dialects.lengths import ChatLengthParameters, read_chat_max_tokens
from gateway.dialects.parameters import REJECTED_BY_CHATS, Endpoints, unread
from gateway.dialects.profile import Profile
from gateway.dialects.request import ChatRequest, GenerationRequest
from gateway.dialects.stream_options import MAX_LABEL_CHARACTERS
from gateway.dialects.unknown_members import unread_inside
from gateway.records.errors import invalid, must

MAX_METADATA = 16
MAX_METADATA_KEY_CHARACTERS = 64
MAX_METADATA_CHARACTERS = 512


class LabelParameters(Parameters):
    """Labels that clients attach to a request; they have no effect."""

    metadata: Any = Field(
        default=None,
        description=f"Up to {MAX_METADATA} pairs of strings for the client's use; not stored.",
        json_schema_extra=schema_of(
            f"dict[str[:{MAX_METADATA_KEY_CHARACTERS}], str[:{MAX_METADATA_CHARACTERS}], "
            f":{MAX_METADATA}] | None"
        ),
    )
    safety_identifier: Annotated[str, Field(max_length=MAX_LABEL_CHARACTERS)] | None = None
    """Another name of `user`."""
    prompt_cache_key: Annotated[str, Field(max_length=MAX_LABEL_CHARACTERS)] | None = None
    """Names the session of the request: it goes to the worker that served the session last, if
    that has room. Requests with a common prefix share cached work without it."""


class ChatCompletionRequest(
    LabelParameters,
    ThinkingParameters,
    ChatToolParameters,
    ChatLengthParameters,
    SharedParameters,
    TemplateParameters,
    MessageParameters,
):
    """Body of `POST /v1/chat/completions`. Null means absent for every parameter."""


def to_chat_generation_request(
    body: ChatCompletionRequest, profile: Profile, *, max_prompts: int
) -> GenerationRequest:
    """Resolve shapes, aliases and defaults. Raises a BadRequestError that names the place.

    The prompt is empty, and images are in `ChatRequest.image_sources` only. `max_prompts` limits
    `n`.
    """
    check_metadata(body.metadata)
    conversation = read_messages(body.messages, takes_any_role=profile.takes_any_role)
    ignored = unread(body.model_extra, REJECTED_BY_CHATS) + shared_extra(body)
    thinking, tools = read_thinking(body, profile), read_chat_tools(body, profile)
    ignored += [*conversation.ignored, *unread_inside(body, Endpoints.CHATS)]
    n = read_chat_n(body, most=max_prompts)
    shared = read_shared(body, profile, max_tokens=read_chat_max_tokens(body, profile))
    request = msgspec.structs.replace(
        shared,
        chat=_chat(body, profile, conversation, thinking, tools),
        adds_special_tokens=False,
        n=n,
        best_of=n,
        logprobs=read_logprobs(body, by_default=0, most=profile.most_top_logprobs),
        tool_use=tools.use,
        sampling=msgspec.structs.replace(shared.sampling, thinking_budget=thinking.budget),
        ignored_parameters=tuple(sorted(ignored)),
    )
    if request.prompt_logprobs is not None and conversation.image_sources:
        raise invalid(
            "prompt_logprobs", "cannot be combined with images, which have no log-probabilities."
        )
    return with_one_constraint(request)


def _chat(
    body: ChatCompletionRequest,
    profile: Profile,
    conversation: Conversation,
    thinking: Thinking,
    tools: ChatTools,
) -> ChatRequest:
    prefills = profile.continues_assistant_message
    continues = read_continues_last(
        body,
        has_partial=conversation.has_partial,
        by_default=prefills and conversation.ends_with_text_of_assistant,
    )
    if continues:
        check_continued(conversation, may_repeat=not prefills)
    arguments, params = read_template_arguments(body, thinking)
    return ChatRequest(
        messages=conversation.messages,
        tools=tools.described,
        image_sources=conversation.image_sources,
        template_arguments=arguments,
        argument_params=params,
        parses_special_tokens=body.safe_tokenization is False,
        continues_last_message=continues,
        shows_reasoning=thinking.is_shown,
        uses_legacy_functions=tools.is_legacy,
        thinking_budget_param=thinking.budget_param,
    )


def check_metadata(value: object) -> None:
    """Raise InvalidParameterError unless `metadata` is within its bounds."""
    if value is None:
        return
    if not isinstance(value, dict):
        raise must("metadata", "be an object", value)
    if len(value) > MAX_METADATA:
        raise must("metadata", f"have at most {MAX_METADATA} entries", len(value))
    for key, text in value.items():
        if len(key) > MAX_METADATA_KEY_CHARACTERS:
            raise invalid(
                "metadata",
                f"must have keys of at most {MAX_METADATA_KEY_CHARACTERS} characters. Given: "
                f"{len(key)} characters.",
            )
        if not isinstance(text, str) or len(text) > MAX_METADATA_CHARACTERS:
            raise must(
                f"metadata.{key}",
                f"be a string of at most {MAX_METADATA_CHARACTERS} characters",
                text,
            )
