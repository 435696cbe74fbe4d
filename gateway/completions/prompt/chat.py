"""Render a chat's messages to a prompt with the model's chat template."""

import bisect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from common.clock import now_seconds
from contract.messages import ChatFormat, WorkerCard
from gateway.completions.prompt.chat_templates import ChatTemplates
from gateway.completions.prompt.conversation import (
    Message,
    for_template,
    image_count,
    tools_for_template,
    with_systems_in_place,
    without_json_ends,
)
from gateway.completions.prompt.literal_text import protected
from gateway.completions.prompt.templates.template import (
    ChatTemplate,
    RefusedMessagesError,
    Rendered,
    TooLongError,
)
from gateway.completions.prompt.tokenizers import PromptEncoder
from gateway.dialects.chat.template_arguments import RESERVED
from gateway.dialects.request import ChatRequest, GenerationRequest, Reasoning
from gateway.platform.concurrency.large_work import Beside
from gateway.records.errors import (
    ContextLengthExceededError,
    InvalidParameterError,
    UnsupportedParameterError,
)

CHARACTERS_PER_TOKEN: Final = 16
"""More than the average of any text, so that longer texts are too long without being rendered."""
SLACK_CHARACTERS: Final = 65_536
MAX_OPENING_TOKENS: Final = 256
"""Longest opening that a template gives a response; of a longer one, only its end is examined."""

_LATER_SYSTEM: Final = ("user", "assistant", "system", "user")
"""Roles of the messages that show whether a template keeps the place of a system message."""

_CONTINUATION_MARK: Final = "CONTINUE_FINAL_MESSAGE_TAG "


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedChat:
    """A chat rendered as a prompt."""

    text: str
    """Encode without the tokenizer's own special tokens: the template writes them. The client's
    special tokens are protected (`gateway.completions.prompt.literal_text`)."""
    opening_tokens: int
    """Tokens at the end of the prompt that begin the response, for parsers; 0 if there are none."""
    reasoning: Reasoning | None
    """Reasoning that begins the response; None if there is none or the prompt has ended it."""
    finds_reasoning: bool
    """Whether the response may contain reasoning. Continued content stays content."""
    ignored_template_arguments: tuple[str, ...]
    """Variables that the client set but the template does not read."""


async def render_chat(
    request: GenerationRequest,
    card: WorkerCard,
    templates: ChatTemplates,
    encoder: PromptEncoder,
    beside: Beside,
    *,
    text_tools: frozenset[str] = frozenset(),
) -> RenderedChat:
    """Return the prompt that a model's chat template renders for a chat.

    In calls of `text_tools`, the only argument is written as it is.

    Raises an ApiError: one that names `messages` if the template rejects them,
    ContextLengthExceededError if the prompt cannot fit, and ServiceUnavailableError if the template
    is unusable.
    """
    chat, form = request.chat, card.chat
    if chat is None or form is None:
        raise UnsupportedParameterError(
            f"'messages' is not supported by the model '{card.model}': it has no chat template.",
            param="messages",
        )
    chosen = (await templates.get(form.template_digest)).choose(has_tools=bool(chat.tools))
    rendering = _Rendering(chat, card, form, chosen, encoder, text_tools)
    return await beside(rendering.run)


class _Rendering:
    """Renders one chat."""

    def __init__(
        self,
        chat: ChatRequest,
        card: WorkerCard,
        form: ChatFormat,
        template: ChatTemplate,
        encoder: PromptEncoder,
        text_tools: frozenset[str],
    ) -> None:
        self._text_tools = text_tools
        self._chat = chat
        self._param = chat.param
        self._card = card
        self._form = form
        self._template = template
        self._encoder = encoder
        self._now = datetime.fromtimestamp(now_seconds(), UTC)
        settable = template.variables - RESERVED - form.special_tokens.keys()
        arguments = chat.template_arguments
        self._ignored = tuple(name for name in arguments if name not in settable)
        self._settable = settable
        self._variables: dict[str, Any] = {}

    def run(self) -> RenderedChat:
        """Render the chat."""
        if _size(self._chat) > most_characters(self._card):
            raise _too_long(self._card, self._param)
        try:
            self._variables = self._protected_variables()
            sent: list[Message] = [self._protected_message(each) for each in self._chat.messages]
        except RecursionError:
            raise InvalidParameterError(
                f"'{self._param}' and 'tools' must not be nested so deeply (RecursionError).",
                param=self._param,
            ) from None
        if self._chat.keeps_system_places:
            sent = with_systems_in_place(
                sent,
                has_developer_role=self._template.has_developer_role,
                takes_later_system=self._takes_later_system,
            )
        messages = for_template(
            sent,
            self._form.content_format,
            image_token=self._card.image_token,
            tool_parser=self._form.tool_parser,
            has_developer_role=self._template.has_developer_role,
            text_tools=self._text_tools,
        )
        continues = self._chat.continues_last_message
        if continues:
            text, opening = self._continued(messages), None
        else:
            text, opening = self._rendered(messages, opens=self._chat.opens_message)
        self._check_text(text)
        opening = self._opening(text, messages, opening)
        reasoning = _reasoning(opening, self._form)
        is_content = continues and bool(_marked(messages[-1])[0])
        if is_content and reasoning is not None and not reasoning.is_open:
            reasoning = None
        return RenderedChat(
            text=text,
            opening_tokens=self._count(opening),
            reasoning=reasoning,
            finds_reasoning=bool(self._form.reasoning_parser)
            and (reasoning is not None or not is_content),
            ignored_template_arguments=self._ignored,
        )

    def _protected(self, value: Any, *, allowed: Iterable[str] = ()) -> Any:
        if self._chat.parses_special_tokens:
            return value
        return protected(value, self._encoder.tokenizer, allowed=allowed)

    def _protected_variables(self) -> dict[str, Any]:
        arguments = self._chat.template_arguments
        read = {name: value for name, value in arguments.items() if name in self._settable}
        return {
            **self._form.special_tokens,
            **self._protected(read),
            "tools": tools_for_template(self._protected(self._chat.tools)),
            "documents": None,
        }

    def _protected_message(self, message: dict[str, Any]) -> dict[str, Any]:
        form = self._form
        allowed: tuple[str, ...] = ()
        if message["role"] == "assistant" and form.reasoning_start:
            # A client may return, or begin, an answer together with its reasoning.
            allowed = (form.reasoning_start, form.reasoning_end)
        read: dict[str, Any] = self._protected(message, allowed=allowed)
        return read

    def _takes_later_system(self) -> bool:
        """Whether the template renders a system message where it is, after other messages."""
        texts = [(role, f"{role} {number}") for number, role in enumerate(_LATER_SYSTEM)]
        messages = for_template(
            [{"role": role, "content": text} for role, text in texts],
            self._form.content_format,
            image_token="",
            tool_parser="",
            has_developer_role=True,
        )
        try:
            rendered = self._text(messages, opens=True).text
        except (RefusedMessagesError, TooLongError):
            return False
        places = [rendered.find(text) for _, text in texts]
        return places == sorted(places) and places[0] >= 0

    def _rendered(self, messages: list[dict[str, Any]], *, opens: bool) -> Rendered:
        """Return the text of messages; with `opens`, add the text that begins a response."""
        try:
            return self._text(messages, opens=opens)
        except RefusedMessagesError as error:
            reason = str(error).rstrip(".")
            raise InvalidParameterError(
                f"'{self._param}' was rejected by the model's chat template: {reason}.",
                param=self._param,
            ) from None
        except TooLongError:
            raise _too_long(self._card, self._param) from None

    def _text(self, messages: list[dict[str, Any]], *, opens: bool) -> Rendered:
        rendered = self._template.render_opening(
            {**self._variables, "messages": messages, "add_generation_prompt": opens},
            now=self._now,
            most_characters=most_characters(self._card),
        )
        return Rendered(without_json_ends(rendered.text), None) if self._text_tools else rendered

    def _continued(self, messages: list[dict[str, Any]]) -> str:
        """Return the text up to the end of the last message's content, as in transformers."""
        *earlier, last = messages
        text, marked = _marked(last)
        rendered = self._rendered([*earlier, marked], opens=False).text
        end = rendered.rfind(_CONTINUATION_MARK.rstrip())
        if end < 0 or text.strip() not in rendered:
            param = f"{self._param}[{len(earlier)}]"
            raise InvalidParameterError(
                f"'{param}' cannot be continued: the model's chat template changes its content.",
                param=param,
            )
        is_kept = rendered.startswith(_CONTINUATION_MARK, end)
        # A template that trims the mark also trims the text before it.
        return rendered[:end] if is_kept else rendered[:end].rstrip()

    def _opening(self, text: str, messages: list[dict[str, Any]], rendered: str | None) -> str:
        """Return the end of the text that belongs to the response: header and continued text.

        `rendered` is the end that the template has written for it, if that is known.
        """
        if not (self._form.reasoning_parser or self._form.tool_parser):
            return ""
        if rendered is None:
            history = messages[:-1] if self._chat.continues_last_message else messages
            try:
                before = self._text(history, opens=False).text
            except (RefusedMessagesError, TooLongError):
                before = ""
            common = len(before) if text.startswith(before) else _common(text, before)
        else:
            common = len(text) - len(rendered)
        start = self._form.reasoning_start
        if common == len(text) and start and text.rstrip().endswith(start):
            # This template opens every response this way, even without a generation prompt.
            return text[text.rfind(start) :]
        return text[common:]

    def _count(self, opening: str) -> int:
        if not opening:
            return 0
        count = len(self._encoder.text_ids(opening, adds_special_tokens=False))
        # A continued message may be long and may begin with reasoning.
        return count if self._chat.continues_last_message else min(count, MAX_OPENING_TOKENS)

    def _check_text(self, text: str) -> None:
        if not text:
            raise InvalidParameterError(
                f"'{self._param}' must not be empty: the model's chat template renders no text.",
                param=self._param,
            )
        try:
            text.encode()
        except UnicodeEncodeError:
            raise InvalidParameterError(
                f"'{self._param}' must not contain unpaired surrogates.", param=self._param
            ) from None
        images = sum(map(image_count, self._chat.messages))
        token = self._card.image_token
        found = text.count(token) if token else 0
        if found != images:
            raise InvalidParameterError(
                f"'{self._param}' must not contain the model's image token except for its images. "
                f"Given: {found} image tokens, {images} images.",
                param=self._param,
            )


def _marked(message: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the last text of a message, and the message with a mark after that text."""
    content = message["content"]
    if isinstance(content, str):
        return content, {**message, "content": content + _CONTINUATION_MARK}
    for index in reversed(range(len(content))):
        if (text := content[index].get("text")) is not None:
            part = {"type": "text", "text": text + _CONTINUATION_MARK}
            return text, {**message, "content": [*content[:index], part, *content[index + 1 :]]}
    # Parts are also absent from a message without content.
    part = {"type": "text", "text": _CONTINUATION_MARK}
    return "", {**message, "content": [*content, part]}


def _reasoning(opening: str, form: ChatFormat) -> Reasoning | None:
    if not (form.reasoning_start and form.reasoning_end):
        return None
    start, end = opening.rfind(form.reasoning_start), opening.rfind(form.reasoning_end)
    if end > start:
        return None
    return Reasoning(form.reasoning_start, form.reasoning_end, is_open=start >= 0)


def _common(one: str, other: str) -> int:
    """Return the length of the common prefix of two texts."""
    shorter = min(len(one), len(other))
    return bisect.bisect_left(
        range(shorter), x=True, key=lambda end: one[: end + 1] != other[: end + 1]
    )


def most_characters(card: WorkerCard) -> int:
    """Return the characters of a rendered prompt beyond which none fits the context window."""
    return card.context_window * CHARACTERS_PER_TOKEN + SLACK_CHARACTERS


def _too_long(card: WorkerCard, param: str) -> ContextLengthExceededError:
    window, least = card.context_window, card.context_window + 1
    return ContextLengthExceededError(
        f"you requested at least {least} tokens (at least {least} in the {param})",
        advice=f"Please reduce the length of the {param}. '{param}' and 'tools' must have at "
        f"most {most_characters(card)} characters; more cannot fit.",
        window=window,
        param=param,
        requested=f"at least {least}",
    )


def _size(chat: ChatRequest) -> int:
    """Return the size of what must be rendered, in characters and values."""
    return sum(_sizes([chat.messages, chat.tools, chat.template_arguments]))


def _sizes(values: list[Any]) -> Iterator[int]:
    pending = list(values)
    while pending:
        value = pending.pop()
        yield 1
        if isinstance(value, str):
            yield len(value)
        elif isinstance(value, Mapping):
            pending += value.keys()
            pending += value.values()
        elif isinstance(value, list):
            pending += value
