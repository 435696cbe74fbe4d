"""Check a request before its usage is reserved: parameters, model, prompt, grammar and size."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

import msgspec
from redis.exceptions import RedisError
from tokenizers import Tokenizer

from common.tracing import FETCH_IMAGES
from contract.messages import Feature, Parsing, Ranking, WorkerCard, encode
from contract.tier import ServiceTier
from gateway.completions.admission.call import Call
from gateway.completions.admission.model_choice import Models
from gateway.completions.admission.speech import prepare_speech
from gateway.completions.prompt.chat import render_chat
from gateway.completions.prompt.chat_templates import ChatTemplates
from gateway.completions.prompt.images.fetcher import ImageFetcher, fetch_images
from gateway.completions.prompt.infill import find_template
from gateway.completions.prompt.inputs import check_template_arguments, prepare_inputs
from gateway.completions.prompt.literal_text import MARK
from gateway.completions.prompt.preparation import PreparedRequest, prepare
from gateway.completions.prompt.templates.template import ChatTemplate
from gateway.completions.prompt.tokenizers import PromptEncoder, TokenizerStore
from gateway.completions.sealing import Sealer
from gateway.completions.structure.checker import GrammarChecker
from gateway.completions.structure.formats import FORMATS, HERMES, MISTRAL, CallFormat
from gateway.completions.structure.sandbox.pool import TokenizerSource
from gateway.completions.structure.tools import has_tool_calls
from gateway.dialects.chat.template_arguments import unread_parameters
from gateway.dialects.endpoint import Endpoint, served_endpoints
from gateway.dialects.lengths import MAX_TOKENS_NAMES
from gateway.dialects.messages.edits import CLEAR_TOOL_USES, clear_tool_uses
from gateway.dialects.parameters import (
    check_supported,
    reject_ignored,
    without_thinking_budget,
)
from gateway.dialects.profile import ALL_THAT_FIT, SHORT_DEFAULT
from gateway.dialects.request import (
    GenerationRequest,
    MessagesOptions,
    Reasoning,
    ResponseForm,
    ToolUse,
)
from gateway.dialects.stream_options import AUTO_TIER
from gateway.models.access import is_runnable
from gateway.models.catalogue import RETRY_AFTER_SECONDS
from gateway.platform import tracing
from gateway.platform.concurrency.large_work import Beside
from gateway.platform.settings import Settings
from gateway.records.adapters import Adapter
from gateway.records.aliases import Alias
from gateway.records.errors import (
    ContextLengthExceededError,
    InvalidParameterError,
    NoWorkerError,
    invalid,
    must,
    queue_unavailable,
    unsupported,
)
from gateway.records.limits import SubjectLimits
from gateway.records.usage_record import Counts

_UNREAD_IMAGE = b""
"""Placeholder for an image until the gateway fetches it. Fetching comes last, so that a rejected
request fetches none."""

TOKEN_BYTES: Final = 64
"""Bytes of memory for a token with its text."""
SCORE_BYTES: Final = 160
"""Bytes of memory for one log-probability with its token."""
NUMBER_BYTES: Final = 28
"""Bytes of memory for a number of a vector and its text in JSON."""
PACKED_BYTES: Final = 10
"""The same in base64."""


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
    call_format: str = "hermes"
    """The format that a grammar enforces, in `structure.formats`."""


class CheckedRequest(msgspec.Struct, frozen=True):
    """A validated request, ready to run."""

    endpoint: Endpoint
    request: GenerationRequest
    card: WorkerCard
    prepared: PreparedRequest
    grammar: str
    """The compiled grammar that the text must match; empty for unconstrained text."""
    service_tier: ServiceTier
    parsing: Parsing | None = None
    """How to parse the output of a chat."""
    adapter: Adapter | None = None
    """The adapter that the client selected instead of the model itself."""
    is_sliced: bool = False
    """Whether its completion tokens are reserved in slices, while it runs."""
    alias: Alias | None = None
    """The alias that the request named, if an operator has defined it."""

    @property
    def model(self) -> str:
        """The model name in the response.

        It is the name that the client gave, or the model's own if there is none or an operator has
        defined it as an alias.
        """
        return self.request.model or self.card.model

    @property
    def most(self) -> Counts:
        """The maximum tokens that the request may use, including those that `best_of` discards."""
        prompt_tokens = completion_tokens = 0
        for prompt, images in zip(self.prepared.prompts, self.request.images, strict=True):
            prompt_tokens += self._most_tokens(len(prompt.token_ids), len(images))
            completion_tokens += prompt.max_tokens
        seconds = self.request.speech.seconds if self.request.audio else 0
        return Counts(prompt_tokens, 0, completion_tokens * self.request.best_of, seconds)

    def _most_tokens(self, tokens: int, images: int) -> int:
        """Return the maximum tokens of a prompt.

        The engine determines the exact number of image tokens later.
        """
        most, per_image = self.card.context_window - 1, self.card.image_tokens
        if not images:
            return tokens
        return min(tokens + images * per_image, most) if per_image else most


class RenderedRequest(NamedTuple):
    """A request that its model supports, with the prompt of a chat rendered."""

    chat: CheckedChat
    card: WorkerCard
    tokenizer: Tokenizer
    score_template: ChatTemplate | None = None
    """Renders the pairs of texts that a pooling model compares."""
    prepared: tuple[GenerationRequest, PreparedRequest] | None = None
    """The prompt as tokens, if its length had to be known before."""


@dataclass(eq=False)
class RequestChecker:
    """Checks requests against their dialects and models."""

    _settings: Settings
    _models: Models
    _tokenizers: TokenizerStore
    _chat_templates: ChatTemplates
    _grammars: GrammarChecker
    _sealer: Sealer

    async def check(self, call: Call, endpoint: Endpoint) -> CheckedRequest:
        """Check a request against its dialect, model and context window. Raises an ApiError."""
        rendered = await self._edited(await self.render(call, endpoint), call)
        chat, card = rendered.chat, rendered.card
        choice = call.choice
        request, prepared = rendered.prepared or await self._prepare(rendered, call)
        tier = call.principal.service_tier
        if call.line is not None:
            tier = ServiceTier.BATCH
        elif request.service_tier not in (None, AUTO_TIER):
            tier = ServiceTier(request.service_tier)
        if request.service_tier == AUTO_TIER:
            # The response names the tier that was used.
            request = msgspec.structs.replace(request, service_tier=tier)
        parsing = None
        if chat.parsing is not None and request.chat is not None:
            parsing = _within(chat.parsing, request, prepared)
        checked = CheckedRequest(
            endpoint, request, card, prepared, "", tier, parsing, choice.adapter, alias=choice.alias
        )
        if request.form is ResponseForm.SPEECH:
            return msgspec.structs.replace(checked, grammar=prepared.grammar)
        if request.pooling is not None:
            _check_pooled_size(request, card, most_bytes=self._settings.max_held_bytes)
            return checked
        is_given = any(call.body.get(name) is not None for name in MAX_TOKENS_NAMES)
        has_own_limit = request.max_tokens != ALL_THAT_FIT and (
            is_given or request.max_tokens == SHORT_DEFAULT
        )
        # Agents name a limit that they rarely need.
        if request.is_sliceable and (not has_own_limit or request.form_options is not None):
            checked = msgspec.structs.replace(checked, is_sliced=True)
        elif not has_own_limit:
            checked = _within_limits(checked, call.principal.limits)
        _check_size(request, checked.prepared, most_bytes=self._settings.max_held_bytes)
        return await self._with_grammar(checked, chat, call)

    async def prompt_tokens(self, call: Call, endpoint: Endpoint) -> tuple[int, tuple[str, ...]]:
        """Return the tokens of a request's prompt, as they would be billed. Raises an ApiError.

        They may exceed the context window. An image counts with the most tokens it may have. The
        second value has the parameters without effect.
        """
        rendered = await self._edited(await self.render(call, endpoint), call)
        ignored = rendered.chat.request.ignored_parameters
        try:
            _, prepared = rendered.prepared or await self._prepare(rendered, call)
        except ContextLengthExceededError as error:
            if error.n_prompt_tokens is None:
                raise
            return error.n_prompt_tokens, ignored
        tier = call.principal.service_tier
        request, card = rendered.chat.request, rendered.card
        checked = CheckedRequest(endpoint, request, card, prepared, "", tier)
        return checked.most.prompt_tokens, ignored

    async def render(self, call: Call, endpoint: Endpoint) -> RenderedRequest:
        """Check a request against its dialect and model, and render a chat. Raises an ApiError."""
        principal, choice = call.principal, call.choice
        call.require_model()
        most = self._settings.max_prompts
        read = partial(endpoint.read, call.body, call.profile, max_prompts=most)
        request = await call.beside(read)
        if call.ignored_query:
            ignored = {*request.ignored_parameters, *call.ignored_query}
            request = msgspec.structs.replace(request, ignored_parameters=tuple(sorted(ignored)))
        if call.line is not None:
            request = _of_line(request, call.body)
        if choice.alias is not None:
            # The response names the model that runs.
            request = msgspec.structs.replace(request, model=None)
        if principal.is_strict:
            reject_ignored(request.ignored_parameters)
        try:
            card = (await self._models.find(choice)).card
            tokenizers = self._tokenizers
            get = tokenizers.get if request.parses_special_tokens else tokenizers.get_literal
            tokenizer = await get(card.tokenizer_digest)
        except RedisError:
            raise queue_unavailable() from None
        _check_kind(endpoint, request, card)
        if choice.adapter is not None and not is_runnable(choice.adapter, card):
            raise NoWorkerError(
                f"No worker serves the adapter '{choice.adapter.full_name}' at the moment.",
                retry_after_seconds=RETRY_AFTER_SECONDS,
                model=card.model,
            )
        request = check_supported(
            request,
            card.features,
            has_infill=find_template(tokenizer) is not None,
            has_tools=has_tool_calls(tokenizer),
            max_images=card.max_images,
        )
        if request.form_options is not None and request.chat is not None:
            # What identifies the model to which reasoning is sealed, on any worker.
            adapter = "" if choice.adapter is None else choice.adapter.sha256
            model = f"{card.model} {card.tokenizer_digest} {adapter}"
            opened = partial(
                self._sealer.opened, request, tenant_id=principal.tenant_id, model=model
            )
            request = msgspec.structs.replace(await call.beside(opened), sealed_for=model)
        template = await self._score_template(request, card)
        if request.pooling is not None:
            request = check_template_arguments(request, template, card.model)
        chat = await self._check_chat(request, card, tokenizer, call.beside)
        if principal.is_strict:
            reject_ignored(chat.request.ignored_parameters)
        return RenderedRequest(chat, card, tokenizer, template)

    async def _edited(self, rendered: RenderedRequest, call: Call) -> RenderedRequest:
        """Return a request whose chat is edited, if it is as long as its edit requires."""
        request, applied = rendered.chat.request, list[dict[str, Any]]()
        options, chat = request.form_options, request.chat
        clearing = None if chat is None else chat.clearing
        if chat is None or clearing is None or not isinstance(options, MessagesOptions):
            return rendered
        tokens, rendered = await self._measured(rendered, call)
        clear = partial(clear_tool_uses, chat, clearing, tokens)
        edited, uses = await call.beside(clear)
        if uses:
            changed, card = msgspec.structs.replace(request, chat=edited), rendered.card
            checked = await self._check_chat(changed, card, rendered.tokenizer, call.beside)
            left, shorter = await self._measured(rendered._replace(chat=checked), call)
            cleared = {"cleared_tool_uses": uses, "cleared_input_tokens": max(tokens - left, 0)}
            if tokens - left >= clearing.at_least:
                rendered, applied = shorter, [{"type": CLEAR_TOOL_USES, **cleared}]
        options = msgspec.structs.replace(options, applied_edits=applied)
        request = msgspec.structs.replace(rendered.chat.request, form_options=options)
        return rendered._replace(
            chat=msgspec.structs.replace(rendered.chat, request=request),
            prepared=rendered.prepared and (request, rendered.prepared[1]),
        )

    async def _measured(self, rendered: RenderedRequest, call: Call) -> tuple[int, RenderedRequest]:
        """Return the tokens of a prompt, and the request with the prompt if it fits."""
        try:
            prepared = await self._prepare(rendered, call)
        except ContextLengthExceededError as error:
            if error.n_prompt_tokens is None:
                raise
            return error.n_prompt_tokens, rendered._replace(prepared=None)
        tokens = sum(len(each.token_ids) for each in prepared[1].prompts)
        return tokens, rendered._replace(prepared=prepared)

    async def _score_template(
        self, request: GenerationRequest, card: WorkerCard
    ) -> ChatTemplate | None:
        pooling, support, form = request.pooling, card.pooling, card.chat
        if pooling is None or support is None or form is None:
            return None
        if not (pooling.queries and support.has_score_template):
            return None
        return (await self._chat_templates.get(form.template_digest)).choose(has_tools=False)

    async def _prepare(
        self, rendered: RenderedRequest, call: Call
    ) -> tuple[GenerationRequest, PreparedRequest]:
        chat, card, tokenizer, template, _ = rendered
        request, literal, beside = chat.request, None, call.beside
        if request.form is ResponseForm.SPEECH:
            literal = await self._tokenizers.get_literal(card.tokenizer_digest, is_inner=True)
            return prepare_speech(request, tokenizer, literal, card)
        is_inner = request.chat is not None or template is not None
        has_marks = template is not None or (is_inner and MARK in request.prompts[0])
        if request.infill_param or has_marks:
            literal = await self._tokenizers.get_literal(card.tokenizer_digest, is_inner=is_inner)
        if request.pooling is not None:
            return await prepare_inputs(
                request, tokenizer, card, beside, literal=literal, template=template
            )
        known = None
        if request.parses_special_tokens:
            known = self._tokenizers.known(
                card.tokenizer_digest, call.principal.tenant_id, request.cache_isolation_key
            )
        return request, await prepare(
            request, tokenizer, card, beside, literal=literal, known=known
        )

    async def _check_chat(
        self,
        request: GenerationRequest,
        card: WorkerCard,
        tokenizer: Tokenizer,
        beside: Beside,
    ) -> CheckedChat:
        """Render the messages of a chat; return a completion unchanged. Raises an ApiError."""
        chat, form = request.chat, card.chat
        if chat is None:
            return CheckedChat(request, None, None, request.tool_use)
        inner = None
        if chat.continues_last_message:
            inner = await self._tokenizers.get_literal(card.tokenizer_digest, is_inner=True)
        encoder = PromptEncoder(
            tokenizer,
            vocabulary_size=card.vocabulary_size,
            bos_token_id=card.bos_token_id,
            inner=inner,
        )
        use = request.tool_use if form is not None and form.tool_parser else None
        call_format = _call_format(card, use, tokenizer)
        # Otherwise, a grammar makes a model write Hermes' format.
        must_enforce = use is not None and (use.is_forced or request.structure is not None)
        enforced = use if call_format or must_enforce else None
        texts = [each.name for each in enforced.tools if each.grammar] if enforced else []
        rendered = await render_chat(
            request, card, self._chat_templates, encoder, beside, text_tools=frozenset(texts)
        )
        read = chat.template_arguments.keys() - {*rendered.ignored_template_arguments}
        ignored = unread_parameters(chat, read)
        switch = chat.argument_params.get("enable_thinking", "")
        if (
            switch in ignored
            and not switch.startswith("chat_template_kwargs")
            and not chat.template_arguments["enable_thinking"]
            and Feature.REASONING in card.features
            and request.form is not ResponseForm.MESSAGES
        ):
            raise unsupported(
                switch,
                "cannot turn off the reasoning of this model. Set a variable of its template with "
                "'chat_template_kwargs', or hide it with 'include_reasoning' false.",
            )
        if request.sampling.thinking_budget and rendered.reasoning is None:
            request = without_thinking_budget(request, chat)
        if use is not None and enforced is None:
            ignored += ["tools.format"] * any(each.grammar for each in use.tools)
            ignored += ["tools.strict"] * any(each.is_strict for each in use.tools)
        parsing = Parsing(
            tools=chat.tools if use is not None else [],
            has_hermes_calls=enforced is not None and not call_format,
            text_tools=texts,
            finds_reasoning=rendered.finds_reasoning,
            hides_special_tokens=not request.shows_special_tokens,
            opening_tokens=rendered.opening_tokens,
            template_arguments={name: chat.template_arguments[name] for name in sorted(read)},
        )
        try:
            encode(parsing.tools)
        except OverflowError:
            raise must("tools", "have integers from -2^63 to 2^64 - 1", parsing.tools) from None
        request = msgspec.structs.replace(
            request,
            prompts=[rendered.text],
            images=[[_UNREAD_IMAGE] * len(chat.image_sources)],
            image_params=[[source.param for source in chat.image_sources]],
            ignored_parameters=tuple(sorted({*request.ignored_parameters, *ignored})),
        )
        if use is None and chat.tools and form is not None and form.tool_parser in FORMATS:
            request = _without_calls(request, FORMATS[form.tool_parser], tokenizer)
        return CheckedChat(request, parsing, rendered.reasoning, enforced, call_format or "hermes")

    async def _with_grammar(
        self, checked: CheckedRequest, chat: CheckedChat, call: Call
    ) -> CheckedRequest:
        request, card, principal = checked.request, checked.card, call.principal
        if request.structure is None and chat.enforced_tools is None:
            return checked
        digest = card.tokenizer_digest
        tokenizer = TokenizerSource(
            digest,
            partial(self._tokenizers.file, digest),
            eos_token_ids=card.eos_token_ids,
            vocabulary_size=card.vocabulary_size,
        )
        compiled = await self._grammars.compile(
            request.structure,
            chat.enforced_tools,
            tenant_id=principal.tenant_id,
            tokenizer=tokenizer,
            reasoning=chat.reasoning,
            call_format=chat.call_format,
        )
        if principal.is_strict:
            reject_ignored(compiled.unenforced)
        ignored = (*request.ignored_parameters, *compiled.unenforced)
        request = msgspec.structs.replace(request, ignored_parameters=ignored)
        return msgspec.structs.replace(checked, request=request, grammar=compiled.grammar)


def _call_format(card: WorkerCard, use: ToolUse | None, tokenizer: Tokenizer) -> str:
    """Return the name of the model's call format; empty if a grammar cannot enforce these calls."""
    name = card.chat.tool_parser if card.chat is not None else ""
    if Feature.STRICT_TOOLS not in card.features or name not in FORMATS:
        return ""
    form = FORMATS[name]
    # Older models of Mistral write all calls as one list.
    is_other = form is MISTRAL and tokenizer.token_to_id(form.between) is None
    has_text = use is not None and any(each.grammar for each in use.callable_tools)
    return "" if is_other or (has_text and form is not HERMES) else name


def _without_calls(
    request: GenerationRequest, call_format: CallFormat, tokenizer: Tokenizer
) -> GenerationRequest:
    """Return a request that may call no tool, without the token that begins a call."""
    if tokenizer.token_to_id(call_format.opening) is None:
        return request
    words = [*request.sampling.bad_words, call_format.opening]
    sampling = msgspec.structs.replace(request.sampling, bad_words=words)
    return msgspec.structs.replace(request, sampling=sampling)


def _check_kind(endpoint: Endpoint, request: GenerationRequest, card: WorkerCard) -> None:
    """Raise InvalidParameterError if a model is of another kind than the endpoint."""
    is_speech = card.clip_seconds or request.form is ResponseForm.SPEECH
    if card.pooling is None and request.pooling is None and not is_speech:
        return
    served = served_endpoints(card)
    if endpoint.name not in served:
        raise InvalidParameterError(
            f"The model '{card.model}' does not serve {endpoint.path}. "
            f"It serves {', '.join(served.values())}.",
            param="model",
        )


async def with_images(
    checked: CheckedRequest, images: ImageFetcher, *, tenant_id: str
) -> CheckedRequest:
    """Return the request with its image files; images of a chat may have to be fetched.

    Raises InvalidParameterError, which names an unavailable image, and OverloadedError.
    """
    chat = checked.request.chat
    if chat is None or not chat.image_sources:
        return checked
    with tracing.span(FETCH_IMAGES):
        files = await fetch_images(chat.image_sources, fetcher=images, tenant_id=tenant_id)
    request = msgspec.structs.replace(checked.request, images=[files])
    return msgspec.structs.replace(checked, request=request)


def _of_line(request: GenerationRequest, body: Mapping[str, Any]) -> GenerationRequest:
    """Return the request of a line of a batch, which runs without a client.

    Raises InvalidParameterError.
    """
    if request.stream:
        raise invalid("stream", "must be false in a batch.")
    if body.get("models"):
        raise must("models", "be absent in a batch", body["models"])
    if request.service_tier not in (None, AUTO_TIER):
        raise must("service_tier", "be absent or auto in a batch", request.service_tier)
    return msgspec.structs.replace(request, is_background=True)


def _within_limits(checked: CheckedRequest, subjects: Iterable[SubjectLimits]) -> CheckedRequest:
    """Lower max_tokens, which the client did not set, to what the token limits can ever allow.

    It stays what each choice needs at least, so that a refusal names the smallest request.
    """
    most, prompts = checked.most, checked.prepared.prompts
    room = most.completion_tokens
    for each in subjects:
        for limit, prompt_tokens in (
            (each.limits.tokens_per_minute, most.prompt_tokens),
            (each.limits.tokens_per_day, most.prompt_tokens),
            (each.limits.completion_tokens_per_minute, 0),
        ):
            room = room if limit is None else min(room, limit - prompt_tokens)
    if room == most.completion_tokens:
        return checked
    tokens = room // (len(prompts) * checked.request.best_of)
    tokens = max(tokens, 1, checked.request.sampling.min_tokens)
    lowered = [
        msgspec.structs.replace(prompt, max_tokens=min(prompt.max_tokens, tokens))
        for prompt in prompts
    ]
    prepared = msgspec.structs.replace(checked.prepared, prompts=lowered)
    return msgspec.structs.replace(checked, prepared=prepared)


def _check_size(request: GenerationRequest, prepared: PreparedRequest, *, most_bytes: int) -> None:
    """Reject a response that may need more memory than allowed, before a worker runs it.

    Raises InvalidParameterError.
    """
    is_ranked = request.best_of > request.n or request.ranking is Ranking.SUM
    if request.stream and not is_ranked:
        return
    sequences = request.best_of if is_ranked else request.n
    tokens = sum(prompt.max_tokens for prompt in prepared.prompts) * sequences
    scores = 0 if request.logprobs is None else request.logprobs + 1
    held_bytes = tokens * (TOKEN_BYTES + scores * SCORE_BYTES)
    if held_bytes > most_bytes:
        raise InvalidParameterError(
            f"The response may need {held_bytes} bytes of memory ({tokens} tokens, {scores} "
            f"log-probabilities each); the limit is {most_bytes} bytes. Reduce "
            f"'{request.max_tokens_param}' or the number of choices or log-probabilities, or "
            "stream without 'best_of'.",
            param=request.max_tokens_param,
        )


def _check_pooled_size(request: GenerationRequest, card: WorkerCard, *, most_bytes: int) -> None:
    """Reject a response of vectors that may need more memory than allowed.

    Raises InvalidParameterError.
    """
    pooling, support = request.pooling, card.pooling
    if pooling is None or support is None:
        return
    numbers = sum(pooling.groups) * (pooling.dimensions or support.size)
    held_bytes = numbers * (PACKED_BYTES if pooling.is_base64 else NUMBER_BYTES)
    if held_bytes > most_bytes:
        raise InvalidParameterError(
            f"The response may need {held_bytes} bytes of memory ({numbers} numbers); the limit is "
            f"{most_bytes} bytes. Send fewer texts in a request, or use 'encoding_format' base64.",
            param=pooling.param,
        )


def _within(parsing: Parsing, request: GenerationRequest, prepared: PreparedRequest) -> Parsing:
    """Return the parsing for a prompt whose truncation may have cut the opening of the output."""
    tokens = len(prepared.prompts[0].token_ids)
    if request.keeps_prompt_start:
        tokens = min(tokens, max(parsing.opening_tokens - prepared.cut_tokens, 0))
    if parsing.opening_tokens <= tokens:
        return parsing
    return msgspec.structs.replace(parsing, opening_tokens=tokens)
