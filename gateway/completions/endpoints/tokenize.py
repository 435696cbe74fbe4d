"""Tokenize and detokenize: `POST /tokenize` and `/detokenize`, as in vLLM and llama.cpp.

`GET /tokenizer_info` describes the tokenizer of a model, as in vLLM.
"""

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import msgspec
from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict, Field
from pydantic.json_schema import SkipJsonSchema

from common.not_none import not_none
from contract.messages import WorkerCard
from gateway.completions.admission.call import Call, RequestReader
from gateway.completions.admission.model_choice import Models
from gateway.completions.prompt.chat import render_chat
from gateway.completions.prompt.chat_templates import ChatTemplates
from gateway.completions.prompt.tokenization import llamacpp_tokens, tokenizer_config, vllm_tokens
from gateway.completions.prompt.tokenizers import PromptEncoder, TokenizerStore
from gateway.dialects.chat.messages import MESSAGES_SCHEMA
from gateway.dialects.chat.template_arguments import KWARGS_SCHEMA, unread_parameters
from gateway.dialects.endpoint import CHATS
from gateway.dialects.json_types import schema_of
from gateway.dialects.parameters import ignored_header, reject_ignored
from gateway.dialects.profile import Dialect
from gateway.dialects.structured.tools import TOOLS_SCHEMA
from gateway.dialects.wire import validate
from gateway.http.services import services_of
from gateway.records.errors import invalid, must, unsupported

router = APIRouter()

MAX_CHARACTERS: Final = 1_000_000
"""Maximum characters to tokenize: tokens take about ten times the memory of their text."""
MAX_TOKENS: Final = 1_000_000
"""Maximum token ids to detokenize."""


class _Body(BaseModel):
    """Fields common to all bodies."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = Field(None, description="Default: the account's default or only model.")


class VllmTokenizeRequest(_Body):
    """Body of `/tokenize` in vLLM's format."""

    prompt: str = Field(max_length=MAX_CHARACTERS, description="The text.")
    add_special_tokens: bool = True
    return_token_strs: bool = False


class ChatTokenizeRequest(_Body):
    """Body of `/tokenize` with a chat, in vLLM's format."""

    # `CHATS.read` validates the fields without a type.

    messages: Any = Field(
        description="A chat, rendered with the model's template.", json_schema_extra=MESSAGES_SCHEMA
    )
    tools: Any = Field(None, json_schema_extra=TOOLS_SCHEMA)
    chat_template_kwargs: Any = Field(None, json_schema_extra=KWARGS_SCHEMA)
    add_generation_prompt: bool = True
    continue_final_message: Any = Field(None, json_schema_extra=schema_of("bool | None"))
    add_special_tokens: bool = False
    return_token_strs: bool = False
    # Rejected, as in chats.
    chat_template: SkipJsonSchema[Any] = None
    media_io_kwargs: SkipJsonSchema[Any] = None
    mm_processor_kwargs: SkipJsonSchema[Any] = None


_CHAT_FIELDS: Final = (
    *("messages", "chat_template_kwargs", "continue_final_message", "chat_template"),
    *("media_io_kwargs", "mm_processor_kwargs"),
)
"""Fields that are read as in a chat."""


class LlamacppTokenizeRequest(_Body):
    """Body of `/tokenize` in llama.cpp's format."""

    content: str = Field(max_length=MAX_CHARACTERS, description="The text.")
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False


class DetokenizeRequest(_Body):
    """Body of `/detokenize`."""

    tokens: Any = Field(json_schema_extra=schema_of(f"list[int[0:], :{MAX_TOKENS}]"))


@dataclass(eq=False)
class Tokenization:
    """Tokenizes and detokenizes with the tokenizers of models."""

    _reader: RequestReader
    _models: Models
    _tokenizers: TokenizerStore
    _chat_templates: ChatTemplates

    async def tokenize(self, request: Request) -> Response:
        """Respond in the format of the request."""
        call = await self._reader.read(request)
        names = ("prompt", "messages", "content")
        [*others, name] = [each for each in names if call.body.get(each) is not None] or ["prompt"]
        if others:
            raise invalid(name, f"cannot be combined with '{others[0]}': a request has one text.")
        if name == "messages":
            return await self._tokenize_chat(call)
        return await (
            self._tokenize_as_llamacpp(call) if name == "content" else self._tokenize_as_vllm(call)
        )

    async def detokenize(self, request: Request) -> Response:
        """Respond in vLLM's format in its dialect or if a model is named, else in llama.cpp's."""
        call = await self._reader.read(request)
        body = validate(DetokenizeRequest, call.body)
        encoder = await self._encoder(await self._card(call))
        is_vllm = call.profile.name is Dialect.VLLM or body.model is not None
        name = "prompt" if is_vllm else "content"

        def work() -> dict[str, Any]:
            return {name: encoder.decode(_read_ids(body.tokens, encoder))}

        return await _respond(call, body, work)

    async def info(self, request: Request, model: str | None) -> Response:
        """Return the configuration of a model's tokenizer."""
        card = await self._card(await self._reader.read_query(request, {"model": model}))
        tokenizer = await self._tokenizers.get(card.tokenizer_digest)
        sources: dict[str, str] = {}
        if card.chat is not None:
            sources = (await self._chat_templates.get(card.chat.template_digest)).sources
        content = msgspec.json.encode(tokenizer_config(tokenizer, card, sources))
        return Response(content, media_type="application/json")

    async def _tokenize_as_vllm(self, call: Call) -> Response:
        body = validate(VllmTokenizeRequest, call.body)
        card = await self._card(call)
        work = partial(
            vllm_tokens,
            await self._encoder(card),
            body.prompt,
            adds_special_tokens=body.add_special_tokens,
            shows_tokens=body.return_token_strs,
            window=card.context_window,
        )
        return await _respond(call, body, work)

    async def _tokenize_chat(self, call: Call) -> Response:
        body = validate(ChatTokenizeRequest, call.body)
        card = await self._card(call)
        fields = {name: getattr(body, name) for name in _CHAT_FIELDS}
        # vLLM rejects an empty list in chats only.
        fields |= {"model": card.model, "tools": None if body.tools == [] else body.tools}
        if call.body.get("add_generation_prompt"):
            fields["add_generation_prompt"] = True
        request = await call.beside(partial(CHATS.read, fields, call.profile, max_prompts=1))
        chat = not_none(request.chat)
        if chat.image_sources:
            raise unsupported(
                "messages",
                "with images are not supported: the engine determines an image's tokens.",
            )
        chat = replace(chat, opens_message=body.add_generation_prompt)
        request = msgspec.structs.replace(request, chat=chat)
        encoder = await self._encoder(card, is_chat=True)
        rendered = await render_chat(request, card, self._chat_templates, encoder, call.beside)
        if len(rendered.text) > MAX_CHARACTERS:
            raise invalid(
                "messages",
                f"must have at most {MAX_CHARACTERS} characters as a prompt. Given: "
                f"{len(rendered.text)} characters.",
            )
        read = chat.template_arguments.keys() - {*rendered.ignored_template_arguments}
        work = partial(
            vllm_tokens,
            encoder,
            rendered.text,
            adds_special_tokens=body.add_special_tokens,
            shows_tokens=body.return_token_strs,
            window=card.context_window,
        )
        ignored = [*request.ignored_parameters, *unread_parameters(chat, read)]
        return await _respond(call, body, work, size=len(rendered.text), ignored=ignored)

    async def _tokenize_as_llamacpp(self, call: Call) -> Response:
        body = validate(LlamacppTokenizeRequest, call.body)
        card = await self._card(call)
        work = partial(
            llamacpp_tokens,
            await self._encoder(card, parses_special=body.parse_special),
            body.content,
            adds_special_tokens=body.add_special,
            shows_pieces=body.with_pieces,
        )
        return await _respond(call, body, work)

    async def _card(self, call: Call) -> WorkerCard:
        return (await self._models.find(call.choice)).card

    async def _encoder(
        self, card: WorkerCard, *, parses_special: bool = True, is_chat: bool = False
    ) -> PromptEncoder:
        tokenizers, inner = self._tokenizers, None
        if is_chat:
            inner = await tokenizers.get_literal(card.tokenizer_digest, is_inner=True)
        get = tokenizers.get if parses_special else tokenizers.get_literal
        return PromptEncoder(
            await get(card.tokenizer_digest),
            vocabulary_size=card.vocabulary_size,
            bos_token_id=card.bos_token_id,
            inner=inner,
        )


@router.get("/tokenizer_info", summary="Describe a tokenizer", tags=["Tokenization"])
@router.get("/v1/tokenizer_info", include_in_schema=False)
async def tokenizer_info(request: Request, model: str | None = None) -> Response:
    """Return the configuration of a model's tokenizer, in the form of tokenizer_config.json."""
    return await services_of(request)[Tokenization].info(request, model)


def _add_route(path: str, serve: Callable[[Tokenization, Request], Awaitable[Response]]) -> None:
    async def route(request: Request) -> Response:
        return await serve(services_of(request)[Tokenization], request)

    router.add_route(path, route, methods=["POST"])


# Plain routes, which gateway.process.openapi.operations describes.
for _prefix in ("", "/v1"):
    _add_route(f"{_prefix}/tokenize", Tokenization.tokenize)
    _add_route(f"{_prefix}/detokenize", Tokenization.detokenize)


def _read_ids(tokens: Any, encoder: PromptEncoder) -> list[int]:
    if not isinstance(tokens, list):
        raise must("tokens", "be an array of token ids", tokens)
    if len(tokens) > MAX_TOKENS:
        raise must("tokens", f"have at most {MAX_TOKENS} token ids", len(tokens))
    for position, token in enumerate(tokens):
        if type(token) is not int:  # `isinstance(True, int)` is true.
            raise must(f"tokens[{position}]", "be a token id", token, param="tokens")
    encoder.check_ids(tokens, param="tokens")
    return tokens


async def _respond(
    call: Call,
    body: _Body,
    work: Callable[[], dict[str, Any]],
    *,
    size: int = 0,
    ignored: Iterable[str] = (),
) -> Response:
    ignored = sorted({*(body.model_extra or {}), *ignored})
    if call.principal.is_strict:
        reject_ignored(ignored)
    content = await call.beside(lambda: msgspec.json.encode(work()), size=size)
    return Response(content, media_type="application/json", headers=ignored_header(ignored))
