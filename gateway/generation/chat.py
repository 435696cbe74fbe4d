"""Check a chat: render its prompt, and determine how to parse its output."""

import msgspec
from tokenizers import Tokenizer

from contract.messages import Feature, Parsing, WorkerCard
from gateway.concurrency.large_work import Beside
from gateway.dialects.chat.template_arguments import unread_parameters
from gateway.dialects.request import GenerationRequest, Reasoning, ToolMode, ToolUse
from gateway.errors import UnsupportedParameterError
from gateway.http.context import ProcessContext
from gateway.prompt.chat import render_chat

_UNREAD_IMAGE = b""
"""Placeholder for an image until the gateway fetches it. Fetching comes last, so that a rejected
request fetches none."""


class CheckedChat(msgspec.Struct, frozen=True):
    """A chat converted to a completion; a completion request is unchanged."""

    request: GenerationRequest
    """The request with its one rendered prompt and the parameters that the template ignores."""
    parsing: Parsing | None
    """None for a completion."""
    reasoning: Reasoning | None
    """The reasoning before structured output."""
    enforced_tools: ToolUse | None
    """Tool use of the request, unless no grammar can describe the model's tool-call format."""


async def check_chat(
    context: ProcessContext,
    request: GenerationRequest,
    card: WorkerCard,
    tokenizer: Tokenizer,
    beside: Beside,
) -> CheckedChat:
    """Render the messages of a chat; return a completion unchanged. Raises an ApiError."""
    chat, form = request.chat, card.chat
    if chat is None:
        return CheckedChat(request, None, None, request.tool_use)
    rendered = await render_chat(request, card, context.chat_templates, tokenizer, beside)
    assert form is not None  # noqa: S101 - nothing is rendered without it
    read = chat.template_arguments.keys() - {*rendered.ignored_template_arguments}
    ignored = unread_parameters(chat, read)
    switch = chat.argument_params.get("enable_thinking", "")
    if (
        switch in ignored
        and not switch.startswith("chat_template_kwargs")
        and not chat.template_arguments["enable_thinking"]
        and Feature.REASONING in card.features
    ):
        raise UnsupportedParameterError(
            f"'{switch}' cannot turn off the reasoning of this model. Set a variable of its "
            "template with 'chat_template_kwargs', or hide it with 'include_reasoning' false.",
            param=switch,
        )
    use = request.tool_use if form.tool_parser else None
    enforced = use if use is not None and _can_be_enforced(request, use, card) else None
    parsing = Parsing(
        tools=chat.tools if use is not None else [],
        has_hermes_calls=enforced is not None and Feature.STRICT_TOOLS not in card.features,
        finds_reasoning=rendered.finds_reasoning,
        hides_special_tokens=not request.shows_special_tokens,
        opening_tokens=rendered.opening_tokens,
        template_arguments={name: chat.template_arguments[name] for name in sorted(read)},
    )
    request = msgspec.structs.replace(
        request,
        prompts=[rendered.text],
        images=[[_UNREAD_IMAGE] * len(chat.image_sources)],
        image_params=[[source.param for source in chat.image_sources]],
        ignored_parameters=tuple(sorted({*request.ignored_parameters, *ignored})),
    )
    return CheckedChat(request, parsing, rendered.reasoning, enforced)


def _can_be_enforced(request: GenerationRequest, use: ToolUse, card: WorkerCard) -> bool:
    """Whether a grammar can enforce the calls, in Hermes' format or in the model's own."""
    uses_hermes_format = use.mode is not ToolMode.AUTO or request.structure is not None
    return uses_hermes_format or Feature.STRICT_TOOLS in card.features
