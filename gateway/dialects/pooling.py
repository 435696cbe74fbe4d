"""Embeddings, classification, scores and reranking: the bodies of the pooling endpoints."""

from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from functools import partial
from typing import Annotated, Any, Final

import msgspec
from pydantic import Field

from contract.sampling import Range, SamplingSpec
from gateway.dialects.bodies import read_model
from gateway.dialects.chat.request import ChatCompletionRequest, to_chat_generation_request
from gateway.dialects.chat.template_arguments import KWARGS_SCHEMA, read_template_kwargs
from gateway.dialects.fields import COUNT, agreed, bounded
from gateway.dialects.json_types import schema_of
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
from gateway.records.errors import InvalidParameterError, MissingParameterError, must

MAX_INPUTS: Final = 2_048
"""Maximum texts of a request, which is OpenAI's limit."""
_DIMENSIONS: Final = Range(1, 65_536)
_TEXTS: Final = f"str | list[str, 1:{MAX_INPUTS}]"
_DOCUMENT: Final = 'str | {"text": str}'
_CHAT_FIELDS: Final = ("chat_template_kwargs", "continue_final_message")


class EncodingFormat(StrEnum):
    """How vectors are written into the response."""

    FLOAT = "float"
    BASE64 = "base64"


class PoolingParameters(TruncationParameters, AccountParameters):
    """Parameters of all pooling endpoints."""

    model: str | None = Field(
        default=None,
        description="The model, from `GET /v1/models`. Required in dialects openai, fireworks and "
        "omlx; in others, the account's default model is used if absent.",
    )
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=COUNT.maximum), INTEGRAL] | None = Field(
        default=None,
        description="Keep this many tokens of each text; -1 keeps all that fit into the context "
        "window. Default: keep all, and reject a text that is too long.",
    )
    truncation_side: Annotated[TruncationSide, Field(strict=False)] | None = Field(
        default=None,
        description="Which tokens `truncate_prompt_tokens` removes: `left` the first ones, `right` "
        "the last ones. Tokens that the tokenizer adds are kept. Of a pair that the model reads as "
        "one text, only the document is cut. Default: right.",
    )
    add_special_tokens: bool | None = Field(
        default=None,
        description="Whether to add the tokenizer's own tokens to texts. Default: true, and false "
        "for `messages`.",
    )
    use_activation: bool | None = Field(
        default=None,
        description="Whether vectors are normalized and scores are probabilities. Default: as the "
        "model defines, mostly true.",
    )


class InputParameters(PoolingParameters):
    """Texts that the model reads one by one."""

    input: Any = Field(
        default=None,
        description=f"A text, a list of token ids, or a list of up to {MAX_INPUTS} of them; none "
        "may be empty. Required without `messages`.",
        json_schema_extra=schema_of(
            f"str[1:] | list[int[0:], 1:] | list[str[1:] | list[int[0:], 1:], 1:{MAX_INPUTS}]"
        ),
    )
    messages: Any = Field(
        default=None,
        description="One chat in place of `input`; the model's chat template makes it a text.",
        json_schema_extra=schema_of("list[dict, 1:]"),
    )
    add_generation_prompt: bool | None = Field(
        default=None,
        description="Whether the text of `messages` ends with the beginning of a response. "
        "Default: false.",
    )
    continue_final_message: bool | None = Field(
        default=None, description="Whether the last message stays open. Default: false."
    )
    chat_template_kwargs: Any = Field(
        default=None,
        description="Variables of the chat template.",
        json_schema_extra=KWARGS_SCHEMA,
    )


class EmbeddingRequest(InputParameters):
    """Body of `POST /v1/embeddings`. Null means absent for every parameter."""

    dimensions: Annotated[int, bounded(_DIMENSIONS), INTEGRAL] | None = Field(
        default=None,
        description="Numbers of each vector, for models with Matryoshka representations.",
    )
    encoding_format: Annotated[EncodingFormat, Field(strict=False)] | None = Field(
        default=None,
        description="`float`: an array of numbers, `base64`: the bytes of float32 numbers, "
        "little-endian. Default: float.",
    )


class ClassificationRequest(InputParameters):
    """Body of `POST /v1/classify`. Null means absent for every parameter."""


class ComparisonParameters(PoolingParameters):
    """Queries and documents that the model compares."""

    max_tokens_per_query: Annotated[int, bounded(COUNT), INTEGRAL] | None = Field(
        default=None, description="Keep this many first tokens of each query; 0: all. Default: 0."
    )
    max_tokens_per_doc: Annotated[int, bounded(COUNT), INTEGRAL] | None = Field(
        default=None,
        description="Keep this many first tokens of each document; 0: all. Default: 0.",
    )
    instruction: str | None = Field(
        default=None,
        description="What the model judges: the variable `instruction` of its score template. "
        "Models without that variable reject it. Default: the template's.",
    )
    chat_template_kwargs: Any = Field(
        default=None,
        description="Variables of the score template.",
        json_schema_extra=KWARGS_SCHEMA,
    )


def _texts(description: str) -> Any:
    return Field(default=None, description=description, json_schema_extra=schema_of(_TEXTS))


class ScoreRequest(ComparisonParameters):
    """Body of `POST /v1/score`. Null means absent for every parameter."""

    text_1: Any = _texts("One query, which is compared with each document, or as many as those.")
    text_2: Any = _texts("The documents.")
    queries: Any = _texts("Another name of `text_1`.")
    documents: Any = _texts("Another name of `text_2`.")
    data_1: Any = _texts("Another name of `text_1`.")
    data_2: Any = _texts("Another name of `text_2`.")
    items: Any = _texts("Another name of `text_2`.")


class RerankRequest(ComparisonParameters):
    """Body of `POST /v1/rerank` and `/v2/rerank`. Null means absent for every parameter."""

    query: str | None = Field(default=None, description="The query. Required.")
    documents: Any = Field(
        default=None,
        description="The documents: texts, or objects with a `text`. Required.",
        json_schema_extra=schema_of(f"list[{_DOCUMENT}, 1:{MAX_INPUTS - 1}]"),
    )
    top_n: Annotated[int, bounded(COUNT), INTEGRAL] | None = Field(
        default=None, description="Return only the best results; 0: all. Default: 0."
    )
    return_documents: bool | None = Field(
        default=None,
        description="Whether results contain their documents. Default: true, and false at "
        "`/v2/rerank`.",
    )


def read_embedding(
    body: dict[str, Any], profile: Profile, *, max_prompts: int
) -> GenerationRequest:
    """Return the request of a body of `/v1/embeddings`. Raises a BadRequestError."""
    wire = validate(EmbeddingRequest, body)
    return _read_inputs(
        wire,
        profile,
        PoolingRequest(
            kind=PoolingKind.EMBEDDINGS,
            dimensions=wire.dimensions,
            is_activated=wire.use_activation,
            is_base64=wire.encoding_format is EncodingFormat.BASE64,
        ),
        max_prompts=max_prompts,
    )


def read_classification(
    body: dict[str, Any], profile: Profile, *, max_prompts: int
) -> GenerationRequest:
    """Return the request of a body of `/v1/classify`. Raises a BadRequestError."""
    wire = validate(ClassificationRequest, body)
    pooling = PoolingRequest(kind=PoolingKind.CLASSIFY, is_activated=wire.use_activation)
    return _read_inputs(wire, profile, pooling, max_prompts=max_prompts)


def read_score(body: dict[str, Any], profile: Profile, *, max_prompts: int) -> GenerationRequest:
    """Return the request of a body of `/v1/score`. Raises a BadRequestError."""
    del max_prompts
    wire = validate(ScoreRequest, body)
    first = {"text_1": wire.text_1, "queries": wire.queries, "data_1": wire.data_1}
    second = {"text_2": wire.text_2, "documents": wire.documents, "data_2": wire.data_2}
    query_param, queries = _named_texts(first)
    param, documents = _named_texts(second | {"items": wire.items})
    if len(queries) not in (1, len(documents)):
        raise InvalidParameterError(
            f"'{query_param}' must have one text, or as many as '{param}' ({len(documents)}). "
            f"Given: {len(queries)}.",
            param=query_param,
        )
    pooling = PoolingRequest(
        kind=PoolingKind.SCORE, param=param, query_param=query_param, queries=len(queries)
    )
    return _read_comparison(wire, profile, pooling, queries, documents)


def _read_rerank(
    body: dict[str, Any], profile: Profile, *, max_prompts: int, returns_documents: bool
) -> GenerationRequest:
    del max_prompts
    wire = validate(RerankRequest, body)
    if wire.query is None:
        raise MissingParameterError("query")
    query, documents = _read_texts(wire.query, "query"), wire.documents
    if documents is not None and not isinstance(documents, list):
        raise must("documents", "be an array", documents)
    _, documents = _named_texts({"documents": documents})
    if wire.return_documents is not None:
        returns_documents = wire.return_documents
    pooling = PoolingRequest(
        kind=PoolingKind.RERANK,
        param="documents",
        query_param="query",
        queries=1,
        top_n=wire.top_n or 0,
        documents=documents if returns_documents else [],
    )
    return _read_comparison(wire, profile, pooling, query, documents)


read_rerank = partial(_read_rerank, returns_documents=True)
read_cohere_rerank = partial(_read_rerank, returns_documents=False)


def _read_inputs(
    body: InputParameters, profile: Profile, pooling: PoolingRequest, *, max_prompts: int
) -> GenerationRequest:
    if body.messages is None:
        unused = [each for each in (*_CHAT_FIELDS, "add_generation_prompt") if getattr(body, each)]
        return _request(body, profile, pooling, _read_input(body.input), unused=unused)
    if body.input is not None:
        raise InvalidParameterError(
            "'input' cannot be combined with 'messages': use one of them.", param="input"
        )
    fields = {name: getattr(body, name) for name in (*_CHAT_FIELDS, "messages", "model")}
    wire = validate(ChatCompletionRequest, fields)
    chat = to_chat_generation_request(wire, profile, max_prompts=max_prompts)
    pooling = msgspec.structs.replace(pooling, param="messages")
    request = _request(body, profile, pooling, [""])
    return msgspec.structs.replace(
        request,
        chat=None
        if chat.chat is None
        else replace(chat.chat, opens_message=bool(body.add_generation_prompt)),
        adds_special_tokens=bool(body.add_special_tokens),
        parses_special_tokens=chat.parses_special_tokens,
        ignored_parameters=tuple(sorted({*request.ignored_parameters, *chat.ignored_parameters})),
    )


def _read_comparison(
    body: ComparisonParameters,
    profile: Profile,
    pooling: PoolingRequest,
    queries: list[str],
    documents: list[str],
) -> GenerationRequest:
    pooling = msgspec.structs.replace(
        pooling,
        is_activated=body.use_activation,
        most_query_tokens=body.max_tokens_per_query or 0,
        most_document_tokens=body.max_tokens_per_doc or 0,
        instruction=body.instruction,
        template_arguments=read_template_kwargs(body.chat_template_kwargs),
    )
    return _request(body, profile, pooling, [*queries, *documents])


def _request(
    body: PoolingParameters,
    profile: Profile,
    pooling: PoolingRequest,
    prompts: Sequence[Prompt],
    *,
    unused: Sequence[str] = (),
) -> GenerationRequest:
    if len(prompts) > MAX_INPUTS:
        raise InvalidParameterError(
            f"'{pooling.param}' must have at most {MAX_INPUTS - pooling.queries} texts. "
            f"Given: {len(prompts) - pooling.queries}.",
            param=pooling.param,
        )
    kept = read_prompt_tokens_kept(body)
    ignored = [*unread(body.model_extra, REJECTED_BY_POOLING), *unused]
    if body.truncation_side is not None and kept is None:
        ignored.append("truncation_side")
    return GenerationRequest(
        profile=profile,
        model=read_model(body.model, profile),
        prompts=[*prompts],
        form=ResponseForm.POOLED,
        pooling=pooling,
        images=[[]],
        image_params=[[]],
        adds_special_tokens=body.add_special_tokens is not False,
        prompt_tokens_kept=kept,
        keeps_prompt_start=body.truncation_side is not TruncationSide.LEFT,
        max_tokens=0,
        context_length_behavior=ContextLengthBehavior.ERROR,
        n=1,
        best_of=1,
        stop=[],
        includes_stop=False,
        logprobs=None,
        echo=False,
        stream=False,
        include_usage=False,
        sampling=SamplingSpec(seed=0, temperature=0.0),
        service_tier=read_service_tier(body),
        ignored_parameters=tuple(sorted(ignored)),
    )


def _read_input(value: object) -> list[Prompt]:
    """Return the inputs of `input`. Raises a BadRequestError."""
    if value is None:
        raise MissingParameterError("input")
    # A list may have many token ids, so collect their types without a Python loop.
    is_list = isinstance(value, list) and not set(map(type, value)) <= {int}
    items: list[Any] = value if isinstance(value, list) and is_list else [value]
    if len(items) > MAX_INPUTS:
        raise must("input", f"have at most {MAX_INPUTS} texts", len(items))
    for index, item in enumerate(items):
        path = f"input[{index}]" if is_list else "input"
        is_ids = isinstance(item, list) and set(map(type, item)) <= {int}
        if not isinstance(item, str) and not is_ids:
            raise must(path, "be a text or an array of token ids", item, param="input")
        if not item:
            raise InvalidParameterError(f"'{path}' must not be empty.", param="input")
    return items


def _named_texts(given: dict[str, Any]) -> tuple[str, list[str]]:
    """Return the name and the texts of a parameter that has several names."""
    value = agreed(**given)
    if value is None:
        raise MissingParameterError(next(iter(given)))
    name = next(name for name, each in given.items() if each is not None)
    return name, _read_texts(value, name)


def _read_texts(value: object, name: str) -> list[str]:
    is_list, texts = isinstance(value, list), list[str]()
    for index, item in enumerate(value if isinstance(value, list) else [value]):
        path = f"{name}[{index}]" if is_list else name
        text = item.get("text") if isinstance(item, dict) and item.keys() == {"text"} else item
        if not isinstance(text, str):
            raise must(path, "be a text, or an object with only a 'text'", item, param=name)
        if not text:
            raise InvalidParameterError(f"'{path}' must not be empty.", param=name)
        texts.append(text)
    if not texts:
        raise InvalidParameterError(f"'{name}' must not be empty.", param=name)
    return texts
