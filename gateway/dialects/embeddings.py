"""Embeddings, classification, scores and reranking: the bodies of the pooling endpoints."""

from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from functools import partial
from typing import Annotated, Any, Final

import msgspec
from pydantic import Field

from common.not_none import not_none
from contract.sampling import Range, SamplingSpec
from gateway.dialects.bodies import read_model
from gateway.dialects.chat.request import ChatCompletionRequest, to_chat_generation_request
from gateway.dialects.chat.template_arguments import KWARGS_SCHEMA, read_template_kwargs
from gateway.dialects.fields import COUNT, agreed, bounded, typed
from gateway.dialects.parameters import REJECTED_BY_POOLING, unread
from gateway.dialects.profile import ContextLengthBehavior, Profile
from gateway.dialects.prompts import TruncationParameters, TruncationSide, read_prompt_tokens_kept
from gateway.dialects.request import (
    GenerationRequest,
    PoolingKind,
    PoolingRequest,
    Prompt,
    ResponseForm,
)
from gateway.dialects.stream_options import AccountParameters, read_service_tier
from gateway.dialects.wire import INTEGRAL, validate
from gateway.records.errors import MissingParameterError, invalid, must

MAX_INPUTS: Final = 2_048
"""Maximum texts of a request, which is OpenAI's limit."""
_DIMENSIONS: Final = Range(1, 65_536)
_INPUT: Final = f"str[1:] | list[int[0:], 1:] | list[str[1:] | list[int[0:], 1:], 1:{MAX_INPUTS}]"
_DOCUMENTS: Final = f'list[str | {{"text": str}}, 1:{MAX_INPUTS - 1}]'
_IDS_OR_TEXT: Final = "be a text or an array of token ids"
_OBJECT_OR_TEXT: Final = "be a text, or an object with only a 'text'"
_CHAT_FIELDS: Final = ("chat_template_kwargs", "continue_final_message")


class EncodingFormat(StrEnum):
    """How vectors are written into the response."""

    FLOAT = "float"
    BASE64 = "base64"


class PoolingParameters(TruncationParameters, AccountParameters):
    """Parameters of all pooling endpoints."""

    model: str | None = None
    """The model, from `GET /v1/models`. Required in dialects openai, fireworks and omlx; in others,
    the account's default model is used if absent."""
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=COUNT.maximum), INTEGRAL] | None = None
    """Keep this many tokens of each text; -1 keeps all that fit into the context window. Default:
    keep all, and reject a text that is too long."""
    truncation_side: Annotated[TruncationSide, Field(strict=False)] | None = None
    """Which tokens `truncate_prompt_tokens` removes: `left` the first ones, `right` the last ones.
    Tokens that the tokenizer adds are kept. Of a pair that the model reads as one text, only the
    document is cut. Default: right."""
    add_special_tokens: bool | None = None
    """Whether to add the tokenizer's own tokens to texts. Default: true, and false for
    `messages`."""
    use_activation: bool | None = None
    """Whether vectors are normalized and scores are probabilities. Default: as the model defines,
    mostly true."""
    chat_template_kwargs: Annotated[Any, Field(json_schema_extra=KWARGS_SCHEMA)] = None
    """Variables of the template that renders `messages`, or queries and documents."""


class ClassificationRequest(PoolingParameters):
    """Body of `POST /v1/classify`. Null means absent for every parameter."""

    input: Annotated[Any, typed(_INPUT)] = None
    """A text, a list of token ids, or a list of up to 2,048 of them; none may be empty. Required
    without `messages`."""
    messages: Annotated[Any, typed("list[dict, 1:]")] = None
    """One chat in place of `input`; the model's chat template makes it a text."""
    add_generation_prompt: bool | None = None
    """Whether the text of `messages` ends with the beginning of a response. Default: false."""
    continue_final_message: bool | None = None
    """Whether the last message stays open. Default: false."""


class EmbeddingRequest(ClassificationRequest):
    """Body of `POST /v1/embeddings`. Null means absent for every parameter."""

    dimensions: Annotated[int, bounded(_DIMENSIONS), INTEGRAL] | None = None
    """Numbers of each vector, for models with Matryoshka representations."""
    encoding_format: Annotated[EncodingFormat, Field(strict=False)] | None = None
    """`float`: an array of numbers, `base64`: the bytes of float32 numbers, little-endian. Default:
    float."""


class ComparisonParameters(PoolingParameters):
    """Queries and documents that the model compares."""

    max_tokens_per_query: Annotated[int, bounded(COUNT), INTEGRAL] | None = None
    """Keep this many first tokens of each query; 0: all. Default: 0."""
    max_tokens_per_doc: Annotated[int, bounded(COUNT), INTEGRAL] | None = None
    """Keep this many first tokens of each document; 0: all. Default: 0."""
    instruction: str | None = None
    """What the model judges: the variable `instruction` of its score template. Models without that
    variable reject it. Default: the template's."""


_Texts = Annotated[Any, typed(f"str | list[str, 1:{MAX_INPUTS}]")]


class ScoreRequest(ComparisonParameters):
    """Body of `POST /v1/score`. Null means absent for every parameter."""

    text_1: _Texts = None
    """One query, which is compared with each document, or as many as those."""
    text_2: _Texts = None
    """The documents."""
    queries: _Texts = None
    """Another name of `text_1`."""
    documents: _Texts = None
    """Another name of `text_2`."""
    data_1: _Texts = None
    """Another name of `text_1`."""
    data_2: _Texts = None
    """Another name of `text_2`."""
    items: _Texts = None
    """Another name of `text_2`."""


class RerankRequest(ComparisonParameters):
    """Body of `POST /v1/rerank` and `/v2/rerank`. Null means absent for every parameter."""

    query: str | None = None
    """The query. Required."""
    documents: Annotated[Any, typed(_DOCUMENTS)] = None
    """The documents: texts, or objects with a `text`. Required."""
    top_n: Annotated[int, bounded(COUNT), INTEGRAL] | None = None
    """Return only the best results; 0: all. Default: 0."""
    return_documents: bool | None = None
    """Whether results contain their documents. Default: true, and false at `/v2/rerank`."""


def read_embedding(
    body: dict[str, Any], profile: Profile, *, max_prompts: int
) -> GenerationRequest:
    """Return the request of a body of `/v1/embeddings`. Raises a BadRequestError."""
    wire = validate(EmbeddingRequest, body)
    return _read_inputs(
        wire,
        profile,
        max_prompts,
        kind=PoolingKind.EMBEDDINGS,
        dimensions=wire.dimensions,
        is_base64=wire.encoding_format is EncodingFormat.BASE64,
    )


def read_classification(
    body: dict[str, Any], profile: Profile, *, max_prompts: int
) -> GenerationRequest:
    """Return the request of a body of `/v1/classify`. Raises a BadRequestError."""
    wire = validate(ClassificationRequest, body)
    return _read_inputs(wire, profile, max_prompts, kind=PoolingKind.CLASSIFY)


def read_score(body: dict[str, Any], profile: Profile, *, max_prompts: int) -> GenerationRequest:
    """Return the request of a body of `/v1/score`. Raises a BadRequestError."""
    del max_prompts
    wire = validate(ScoreRequest, body)
    query_param, queries = _read_texts(wire, "text_1", "queries", "data_1")
    param, documents = _read_texts(wire, "text_2", "documents", "data_2", "items")
    if len(queries) not in (1, len(documents)):
        raise must(
            query_param, f"have one text, or as many as '{param}' ({len(documents)})", len(queries)
        )
    return _request(
        wire,
        profile,
        [*queries, *documents],
        kind=PoolingKind.SCORE,
        param=param,
        query_param=query_param,
        queries=len(queries),
    )


def _read_rerank(
    body: dict[str, Any], profile: Profile, *, max_prompts: int, returns_documents: bool
) -> GenerationRequest:
    del max_prompts
    wire = validate(RerankRequest, body)
    query_param, query = _read_texts(wire, "query")
    if not isinstance(wire.documents, list | None):
        raise must("documents", "be an array", wire.documents)
    param, documents = _read_texts(wire, "documents")
    if wire.return_documents is not None:
        returns_documents = wire.return_documents
    return _request(
        wire,
        profile,
        [*query, *documents],
        kind=PoolingKind.RERANK,
        param=param,
        query_param=query_param,
        queries=1,
        top_n=wire.top_n or 0,
        documents=documents if returns_documents else [],
    )


read_rerank = partial(_read_rerank, returns_documents=True)
read_cohere_rerank = partial(_read_rerank, returns_documents=False)


def _read_inputs(
    body: ClassificationRequest, profile: Profile, max_prompts: int, **pooling: Any
) -> GenerationRequest:
    if body.messages is None:
        prompts = _read_entries(body.input, "input", takes_ids=True)
        unused = [each for each in (*_CHAT_FIELDS, "add_generation_prompt") if getattr(body, each)]
        is_list = len(prompts) == 1 and prompts[0] is not body.input
        param = "input[0]" if is_list else "input"
        return _request(body, profile, prompts, unused=unused, param=param, **pooling)
    if body.input is not None:
        raise invalid("input", "cannot be combined with 'messages': use one of them.")
    fields = {name: getattr(body, name) for name in (*_CHAT_FIELDS, "messages", "model")}
    wire = validate(ChatCompletionRequest, fields)
    read = to_chat_generation_request(wire, profile, max_prompts=max_prompts)
    chat = replace(not_none(read.chat), opens_message=bool(body.add_generation_prompt))
    request = _request(body, profile, [""], param="messages", **pooling)
    return msgspec.structs.replace(
        request,
        chat=chat,
        adds_special_tokens=bool(body.add_special_tokens),
        parses_special_tokens=read.parses_special_tokens,
        ignored_parameters=tuple(sorted({*request.ignored_parameters, *read.ignored_parameters})),
    )


def _request(
    body: PoolingParameters,
    profile: Profile,
    prompts: list[Prompt],
    *,
    unused: Sequence[str] = (),
    **pooling: Any,
) -> GenerationRequest:
    """Return a request; `pooling` are fields of its PoolingRequest."""
    if isinstance(body, ComparisonParameters):
        pooling |= {
            "most_query_tokens": body.max_tokens_per_query or 0,
            "most_document_tokens": body.max_tokens_per_doc or 0,
            "instruction": body.instruction,
            "template_arguments": read_template_kwargs(body.chat_template_kwargs),
        }
    pooled = PoolingRequest(is_activated=body.use_activation, **pooling)
    if len(prompts) > MAX_INPUTS:
        raise invalid(
            pooled.param,
            f"must have at most {MAX_INPUTS - pooled.queries} texts. Given: "
            f"{len(prompts) - pooled.queries}.",
        )
    kept = read_prompt_tokens_kept(body)
    ignored = [*unread(body.model_extra, REJECTED_BY_POOLING), *unused]
    if body.truncation_side is not None and kept is None:
        ignored.append("truncation_side")
    return GenerationRequest(
        profile=profile,
        model=read_model(body.model, profile),
        prompts=prompts,
        form=ResponseForm.POOLED,
        pooling=pooled,
        images=[[]],
        image_params=[[]],
        adds_special_tokens=body.add_special_tokens is not False,
        prompt_tokens_kept=kept,
        keeps_prompt_start=body.truncation_side is not TruncationSide.LEFT,
        max_tokens=0,
        context_length_behavior=ContextLengthBehavior.ERROR,
        sampling=SamplingSpec(seed=0, temperature=0.0),
        service_tier=read_service_tier(body),
        ignored_parameters=tuple(sorted(ignored)),
    )


def _read_texts(body: ComparisonParameters, *names: str) -> tuple[str, list[Prompt]]:
    """Return the name and the texts of a parameter that has several names."""
    given = {name: getattr(body, name) for name in names}
    value = agreed(**given)
    name = next((name for name, each in given.items() if each is not None), names[0])
    return name, _read_entries(value, name)


def _read_entries(value: object, name: str, *, takes_ids: bool = False) -> list[Prompt]:
    """Return the texts of a parameter, or with `takes_ids`, texts and lists of token ids.

    Raises a BadRequestError.
    """
    if value is None:
        raise MissingParameterError(name)
    is_list = isinstance(value, list) and not (takes_ids and _are_ids(value))
    entries: list[Any] = value if isinstance(value, list) and is_list else [value]
    texts: list[Prompt] = []
    for index, entry in enumerate(entries):
        path = f"{name}[{index}]" if is_list else name
        text: Any = entry
        if not takes_ids and isinstance(entry, dict) and entry.keys() == {"text"}:
            text = entry["text"]
        if not isinstance(text, str) and not (takes_ids and _are_ids(text)):
            raise must(path, _IDS_OR_TEXT if takes_ids else _OBJECT_OR_TEXT, entry, param=name)
        if not text:
            raise invalid(path, "must not be empty.", param=name)
        texts.append(text)
    if not texts:
        raise invalid(name, "must not be empty.")
    return texts


def _are_ids(value: object) -> bool:
    # A list may have many token ids, so collect their types without a Python loop.
    return isinstance(value, list) and set(map(type, value)) <= {int}
