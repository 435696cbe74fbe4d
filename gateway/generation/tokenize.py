"""Tokenize and detokenize: `POST /tokenize` and `/detokenize`, as in vLLM and llama.cpp."""

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import msgspec
from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from contract.messages import WorkerCard
from gateway.dialects.support import reject_ignored
from gateway.dialects.wire import validate
from gateway.errors import InvalidParameterError, shown
from gateway.generation.call import Call, read_call
from gateway.generation.model_choice import find_card
from gateway.http.ignored_parameters import ignored_header
from gateway.prompt.tokenization import llamacpp_tokens, vllm_tokens
from gateway.prompt.tokenizers import PromptEncoder

router = APIRouter()

MAX_CHARACTERS: Final = 1_000_000
"""Maximum characters to tokenize: tokens take about ten times the memory of their text."""
MAX_TOKENS: Final = 1_000_000
"""Maximum token ids to detokenize."""


class _Body(BaseModel):
    """Fields common to all bodies."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None


class VllmTokenize(_Body):
    """Body of `/tokenize` in vLLM's format."""

    prompt: str = Field(max_length=MAX_CHARACTERS)
    add_special_tokens: bool = True
    return_token_strs: bool = False


class LlamacppTokenize(_Body):
    """Body of `/tokenize` in llama.cpp's format."""

    content: str = Field(max_length=MAX_CHARACTERS)
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False


class Detokenize(_Body):
    """Body of `/detokenize`."""

    tokens: Any


async def tokenize(request: Request) -> Response:
    """Respond in the format of the request."""
    call = await read_call(request)
    if call.body.get("content") is None:
        return await _tokenize_as_vllm(call)
    if call.body.get("prompt") is not None:
        raise InvalidParameterError(
            "'content' cannot be combined with 'prompt', vLLM's name of the same parameter.",
            param="content",
        )
    return await _tokenize_as_llamacpp(call)


async def detokenize(request: Request) -> Response:
    """Respond in vLLM's format if the request names a model, else in llama.cpp's."""
    call = await read_call(request)
    body = validate(Detokenize, call.body)
    encoder = await _encoder(call, await _card(call, body))
    name = "content" if body.model is None else "prompt"

    def work() -> dict[str, Any]:
        return {name: encoder.decode(_read_ids(body.tokens, encoder))}

    return await _respond(call, body, work)


# Plain routes, which gateway.openapi.document describes.
for _path in ("/tokenize", "/v1/tokenize"):
    router.add_route(_path, tokenize, methods=["POST"])
for _path in ("/detokenize", "/v1/detokenize"):
    router.add_route(_path, detokenize, methods=["POST"])


async def _tokenize_as_vllm(call: Call) -> Response:
    body = validate(VllmTokenize, call.body)
    card = await _card(call, body)
    work = partial(
        vllm_tokens,
        await _encoder(call, card),
        body.prompt,
        adds_special_tokens=body.add_special_tokens,
        shows_tokens=body.return_token_strs,
        window=card.context_window,
    )
    return await _respond(call, body, work)


async def _tokenize_as_llamacpp(call: Call) -> Response:
    body = validate(LlamacppTokenize, call.body)
    card = await _card(call, body)
    work = partial(
        llamacpp_tokens,
        await _encoder(call, card, parses_special=body.parse_special),
        body.content,
        adds_special_tokens=body.add_special,
        shows_pieces=body.with_pieces,
    )
    return await _respond(call, body, work)


async def _card(call: Call, body: _Body) -> WorkerCard:
    return await find_card(call.context, call.principal, body.model, profile=call.profile)


async def _encoder(call: Call, card: WorkerCard, *, parses_special: bool = True) -> PromptEncoder:
    tokenizers = call.context.tokenizers
    get = tokenizers.get if parses_special else tokenizers.get_literal
    return PromptEncoder(
        await get(card.tokenizer_digest),
        vocabulary_size=card.vocabulary_size,
        bos_token_id=card.bos_token_id,
    )


def _read_ids(tokens: Any, encoder: PromptEncoder) -> list[int]:
    if not isinstance(tokens, list):
        raise InvalidParameterError(
            f"'tokens' must be an array of token ids. Given: {shown(tokens)}.", param="tokens"
        )
    if len(tokens) > MAX_TOKENS:
        raise InvalidParameterError(
            f"'tokens' must have at most {MAX_TOKENS} token ids. Given: {len(tokens)}.",
            param="tokens",
        )
    for position, token in enumerate(tokens):
        if type(token) is not int:  # `isinstance(True, int)` is true.
            raise InvalidParameterError(
                f"'tokens[{position}]' must be a token id. Given: {shown(token)}.", param="tokens"
            )
    encoder.check_ids(tokens, param="tokens")
    return tokens


async def _respond(call: Call, body: _Body, work: Callable[[], dict[str, Any]]) -> Response:
    ignored = sorted(body.model_extra or {})
    if call.principal.is_strict:
        reject_ignored(ignored)
    content = await call.beside(lambda: msgspec.json.encode(work()))
    return Response(content, media_type="application/json", headers=ignored_header(ignored))
