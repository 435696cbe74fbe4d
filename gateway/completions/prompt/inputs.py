"""Prepare the inputs of a pooling model: token ids that fit the context window, in jobs."""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from itertools import chain
from typing import Any, Final, NamedTuple, cast

import msgspec
from tokenizers import Encoding, Tokenizer

from common.clock import now_seconds
from common.not_none import not_none
from contract.messages import PairForm, Pooling, PoolingSupport, WorkerCard
from contract.prompts import packed
from gateway.completions.prompt.chat import most_characters
from gateway.completions.prompt.literal_text import protected
from gateway.completions.prompt.preparation import PROMPT_SIZE, PreparedPrompt, PreparedRequest
from gateway.completions.prompt.templates.template import (
    ChatTemplate,
    RefusedMessagesError,
    TooLongError,
)
from gateway.completions.prompt.tokenizers import PromptEncoder
from gateway.dialects.request import FIT, GenerationRequest, PoolingRequest, Prompt
from gateway.platform.concurrency.large_work import Beside
from gateway.records.errors import (
    ContextLengthExceededError,
    InvalidParameterError,
    UnsupportedParameterError,
    must,
)

JOB_INPUTS: Final = 32
"""Inputs of one job: few enough that tenants take turns, and that its loss costs little."""
JOB_TOKENS: Final = 8_192
"""Tokens after which a job gets no more inputs."""


class _Input(NamedTuple):
    token_ids: Sequence[int]
    cut_tokens: int = 0
    second_text: int | None = None
    """See `Pooling.second_texts`."""


async def prepare_inputs(
    request: GenerationRequest,
    tokenizer: Tokenizer,
    card: WorkerCard,
    beside: Beside,
    *,
    literal: Tokenizer | None = None,
    template: ChatTemplate | None = None,
) -> tuple[GenerationRequest, PreparedRequest]:
    """Encode the inputs and divide them into jobs, which become the prompts of the request.

    `literal` is the tokenizer for the protected texts of a chat or of a pair that a score
    `template` renders.

    Raises an ApiError that names the input or the parameter.
    """
    pooling, support = not_none(request.pooling), not_none(card.pooling)
    _check_dimensions(pooling.dimensions, support, card.model)
    encoder = PromptEncoder(
        tokenizer,
        vocabulary_size=card.vocabulary_size,
        bos_token_id=card.bos_token_id,
        inner=literal,
    )
    preparation = _Preparation(request, pooling, card, encoder, template)
    jobs = await beside(preparation.run, size=(len(request.prompts) - 1) * PROMPT_SIZE)
    groups = [len(job.pooling.lengths) for job in jobs if job.pooling is not None]
    pooling = msgspec.structs.replace(
        pooling,
        groups=groups,
        labels=support.labels,
        compares_vectors=bool(pooling.queries) and support.pairs is None,
    )
    request = msgspec.structs.replace(
        request,
        pooling=pooling,
        chat=None,
        prompts=[""] * len(groups),
        images=[[]] * len(groups),
        image_params=[[]] * len(groups),
    )
    return request, PreparedRequest(jobs, request.sampling)


class _Preparation:
    """Prepares the inputs of one request."""

    def __init__(
        self,
        request: GenerationRequest,
        pooling: PoolingRequest,
        card: WorkerCard,
        encoder: PromptEncoder,
        template: ChatTemplate | None,
    ) -> None:
        self._request, self._pooling, self._card = request, pooling, card
        self._support = not_none(card.pooling)
        self._encoder, self._tokenizer = encoder, encoder.tokenizer
        self._window = card.context_window
        self._template, self._variables = template, dict[str, Any]()
        if template is not None:
            given = {} if pooling.instruction is None else {"instruction": pooling.instruction}
            self._variables = {
                **not_none(card.chat).special_tokens,
                **protected(given | pooling.template_arguments, self._tokenizer),
                "tools": None,
                "documents": None,
                "add_generation_prompt": False,
            }
        kept = request.prompt_tokens_kept
        self._most = self._window if kept in (None, FIT) else min(kept, self._window)

    def run(self) -> list[PreparedPrompt]:
        """Prepare all inputs."""
        inputs = self._pairs() if self._pooling.queries and self._support.pairs else self._single()
        jobs: list[PreparedPrompt] = []
        job: list[_Input] = []
        tokens = 0
        for each in inputs:
            if job and (len(job) == JOB_INPUTS or tokens + len(each.token_ids) > JOB_TOKENS):
                jobs.append(self._job(job))
                job, tokens = [], 0
            job.append(each)
            tokens += len(each.token_ids)
        return [*jobs, self._job(job)]

    def _job(self, inputs: list[_Input]) -> PreparedPrompt:
        token_ids = packed(chain.from_iterable(each.token_ids for each in inputs))
        seconds = [each.second_text for each in inputs if each.second_text is not None]
        return PreparedPrompt(
            token_ids=token_ids,
            max_tokens=0,
            cut_tokens=sum(each.cut_tokens for each in inputs),
            plain_tokens=len(token_ids),
            shown="",
            pooling=Pooling(
                self._support.task,
                [len(each.token_ids) for each in inputs],
                dimensions=self._pooling.dimensions,
                is_activated=self._pooling.is_activated,
                second_texts=seconds,
            ),
        )

    def _named(self) -> Iterator[tuple[str, Prompt]]:
        """Return the name and the text of each input."""
        pooling, prompts = self._pooling, self._request.prompts
        queries, others = prompts[: pooling.queries], prompts[pooling.queries :]
        for param, texts in ((pooling.query_param, queries), (pooling.param, others)):
            for index, text in enumerate(texts):
                name = param if len(texts) == 1 else f"{param}[{index}]"
                is_lowered = self._support.lowercases and isinstance(text, str)
                yield name, str(text).lower() if is_lowered else text

    def _single(self) -> Iterator[_Input]:
        pooling = self._pooling
        for position, (param, prompt) in enumerate(self._named()):
            is_query = position < pooling.queries
            most = pooling.most_query_tokens if is_query else pooling.most_document_tokens
            yield self._encode(self._start_of(prompt, most), param)

    def _encode(self, prompt: Prompt, param: str) -> _Input:
        """Return the tokens of a text or the given ones, cut if the client wants that."""
        encoder, is_start = self._encoder, self._request.keeps_prompt_start
        part = self._part_of(prompt, param)
        if self._request.chat is not None:
            adds = self._request.adds_special_tokens
            part = [*encoder.encode(part, param=param, adds_special_tokens=adds)]
        if not isinstance(part, str):
            ids = cast("list[int]", part)
            encoder.check_ids(ids, param=param)
            kept = ids[: self._most] if is_start else ids[-self._most :]
            self._check_length(ids, param)
            return _Input(kept, len(ids) - len(kept))
        encoding, cut = self._fitted(part, None, param)
        if not encoding.ids:
            raise InvalidParameterError(f"'{param}' has no tokens.", param=param.partition("[")[0])
        return _Input(encoding.ids, cut)

    def _pairs(self) -> Iterator[_Input]:
        """Return each query with its document, as the model reads them."""
        named, pooling = [*self._named()], self._pooling
        queries, documents = named[: pooling.queries], named[pooling.queries :]
        for index, (param, document) in enumerate(documents):
            query = queries[index if len(queries) > 1 else 0][1]
            first = str(self._start_of(query, pooling.most_query_tokens))
            second = str(self._start_of(document, pooling.most_document_tokens))
            if self._template is not None:
                yield self._templated(self._template, first, second, param)
            elif self._support.pairs is PairForm.JOINED:
                yield self._encode(first + second, param)
            else:
                yield self._pair(first, second, param)

    def _templated(self, template: ChatTemplate, query: str, text: str, param: str) -> _Input:
        """Return the text that a template makes of a pair. If it is too long, cut the document."""
        document = str(self._part_of(text, param))
        query = str(self._encoder.start_of(query, tokens=self._most))
        adds, cut_tokens = self._request.adds_special_tokens, 0
        while True:
            rendered = self._rendered(template, query, document, param)
            ids = self._encoder.encode(rendered, param=param, adds_special_tokens=adds)
            if len(ids) <= self._most:
                return _Input(ids, cut_tokens)
            self._check_length(ids, param)
            excess = len(ids) - self._most
            document = self._without(document, excess)
            if not document:
                raise self._too_long(len(ids), param, is_least=True)
            cut_tokens += excess

    def _rendered(self, template: ChatTemplate, query: str, document: str, param: str) -> str:
        sent = (("query", query), ("document", document))
        messages = [
            {"role": role, "content": protected(text, self._tokenizer)} for role, text in sent
        ]
        try:
            return template.render(
                {**self._variables, "messages": messages},
                now=datetime.fromtimestamp(now_seconds(), UTC),
                most_characters=most_characters(self._card),
            )
        except RefusedMessagesError as error:
            reason = str(error).rstrip(".")
            raise InvalidParameterError(
                f"'{param}' was rejected by the model's score template: {reason}.",
                param=param.partition("[")[0],
            ) from None
        except TooLongError:
            raise self._too_long(self._window + 1, param, is_least=True) from None

    def _pair(self, query: str, document: str, param: str) -> _Input:
        part = str(self._part_of(document, param))
        query = str(self._encoder.start_of(query, tokens=self._most))
        encoding, cut = self._fitted(part, query, param)
        types = encoding.type_ids
        second = types.index(1) if 1 in types else len(types)
        return _Input(encoding.ids, cut, second)

    def _part_of(self, prompt: Prompt, param: str) -> Prompt:
        """Return a text, or enough of one that is far too long and may be cut."""
        is_start, encoder = self._request.keeps_prompt_start, self._encoder
        part = (encoder.start_of if is_start else encoder.end_of)(prompt, tokens=self._most)
        if part is not prompt and self._request.prompt_tokens_kept is None:
            raise self._too_long(self._window + 1, param, is_least=True)
        return part

    def _fitted(self, text: str, query: str | None, param: str) -> tuple[Encoding, int]:
        """Encode a text, after a query if there is one. Return how many tokens of it were cut."""
        adds, encode = self._request.adds_special_tokens, self._tokenizer.encode_batch_fast
        [whole] = encode([text if query is None else (query, text)], add_special_tokens=adds)
        cut = len(whole.ids) - self._most
        if cut <= 0:
            return whole, 0
        self._check_length(whole.ids, param)
        # Cut the text without added tokens, and then add them.
        *before, last = encode([*[query] * (query is not None), text], add_special_tokens=False)
        others = self._tokenizer.num_special_tokens_to_add(bool(before)) if adds else 0
        others += sum(len(each.ids) for each in before)
        if others >= self._most:
            raise self._too_long(others + 1, param, is_least=True)
        side = "right" if self._request.keeps_prompt_start else "left"
        last.truncate(self._most - others, direction=side)
        first, second = (before[0], last) if before else (last, None)
        return self._tokenizer.post_process(first, second, adds), cut

    def _start_of(self, prompt: Prompt, tokens: int) -> Prompt:
        """Return the start of a text that has so many tokens; 0: the whole text."""
        if not tokens or not isinstance(prompt, str):
            return prompt
        text = str(self._encoder.start_of(prompt, tokens=tokens))
        offsets = self._offsets(text)
        return text if len(offsets) <= tokens else text[: offsets[tokens][0]]

    def _without(self, text: str, tokens: int) -> str:
        """Return a text that is so many tokens shorter, at least one character."""
        offsets = self._offsets(text)
        if tokens >= len(offsets):
            return ""
        if self._request.keeps_prompt_start:
            return text[: min(offsets[-tokens][0], len(text) - 1)]
        return text[max(offsets[tokens][0], 1) :]

    def _offsets(self, text: str) -> list[tuple[int, int]]:
        [encoding] = self._tokenizer.encode_batch([text], add_special_tokens=False)
        return encoding.offsets

    def _check_length(self, token_ids: Sequence[int], param: str) -> None:
        if self._request.prompt_tokens_kept is None and len(token_ids) > self._window:
            raise self._too_long(len(token_ids), param)

    def _too_long(
        self, tokens: int, param: str, *, is_least: bool = False
    ) -> ContextLengthExceededError:
        given = f"at least {tokens}" if is_least else str(tokens)
        query = self._pooling.query_param if self._support.pairs else ""
        names = f"'{query}' and '{param}' have" if query else f"'{param}' has"
        return ContextLengthExceededError(
            f"{names} {given} tokens",
            advice=f"Please reduce the length to {self._most} tokens, or cut it with "
            "'truncate_prompt_tokens'.",
            window=self._window,
            param=param.partition("[")[0],
            requested=given,
            n_prompt_tokens=None if is_least else tokens,
        )


def check_template_arguments(
    request: GenerationRequest, template: ChatTemplate | None, model: str
) -> GenerationRequest:
    """Name the variables that the model's score template does not read.

    Raises UnsupportedParameterError for an instruction, without which scores have another meaning.
    """
    pooling = not_none(request.pooling)
    read = frozenset() if template is None else template.variables
    if pooling.instruction is not None and "instruction" not in read:
        raise UnsupportedParameterError(
            f"'instruction' is not supported by the model '{model}', which has no score template "
            "that reads it. Write it into the query.",
            param="instruction",
        )
    unread = (f"chat_template_kwargs.{name}" for name in pooling.template_arguments.keys() - read)
    ignored = tuple(sorted({*request.ignored_parameters, *unread}))
    return msgspec.structs.replace(request, ignored_parameters=ignored)


def _check_dimensions(dimensions: int | None, support: PoolingSupport, model: str) -> None:
    """Raise a BadRequestError if a model has no vectors of this length."""
    if dimensions is None:
        return
    if not support.has_dimensions:
        raise UnsupportedParameterError(
            f"'dimensions' is not supported by the model '{model}': its vectors always have "
            f"{support.size} numbers.",
            param="dimensions",
        )
    if support.dimensions and dimensions not in support.dimensions:
        raise must("dimensions", f"be one of {', '.join(map(str, support.dimensions))}", dimensions)
    if dimensions > support.size:
        raise must("dimensions", f"be at most {support.size}", dimensions)
