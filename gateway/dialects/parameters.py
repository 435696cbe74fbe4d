"""Parameters that are rejected, have no effect, or need a feature of the model.

A parameter that would change the response is served, or rejected with what to use instead. A
parameter without effect on the response is named in a header. `GET /v1/models`, the API reference
and the checks of requests are made from the tables here and from the fields of the bodies.
"""

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from enum import Flag, StrEnum, auto
from itertools import accumulate, compress, islice
from typing import Any, Final, NamedTuple

import msgspec

from contract.messages import Feature
from contract.sampling import DEFAULT_SAMPLERS, SamplerChain
from gateway.dialects.profile import Profile
from gateway.dialects.request import SWITCHES, ChatRequest, GenerationRequest, ResponseForm
from gateway.records.errors import (
    MAX_SHOWN_CHARACTERS,
    UnknownParameterError,
    UnsupportedParameterError,
    must,
    shown,
    unsupported,
)

IGNORED_HEADER: Final = "x-ignored-params"
MAX_NAMED: Final = 32
"""Maximum names in the header, and maximum paths of members that are reported."""

UNSEEN_IMAGE: Final = "[An image, which this model cannot see.]"
"""Replaces an image in the result of a tool, for models without vision."""

_BASE64: Final = (3, 4)
"""Bytes, and the characters that stand for them."""

_SAFE_NAME: Final = re.compile(r"[A-Za-z0-9_.$*\[\]-]{1,192}")
_MAX_HEADER_CHARACTERS: Final = 2048
"""Maximum characters of all names: proxies limit the headers of a response to 4 KiB."""
_NOTHING: Final[tuple[Any, ...]] = (None, "", [], {})
"""Values that request nothing; so does false, except where true is accepted."""


class Endpoints(Flag):
    """The endpoints that reject a parameter."""

    NONE = 0
    COMPLETIONS = auto()
    CHATS = auto()
    POOLING = auto()
    RESPONSES = auto()
    MESSAGES = auto()
    BOTH = COMPLETIONS | CHATS
    ALL = BOTH | POOLING


def unread_file(media_type: str | None, *, data: str = "", name: str | None = None) -> str:
    """Return the text that replaces a file which no model here reads.

    A refused part would stay in the history, so each later turn of an agent would fail. `data` is
    in base64, or a data URI; empty if it is unknown.
    """
    head, _, content = data.rpartition(",")
    media_type = media_type or head.removeprefix("data:").partition(";")[0]
    bytes_, characters = _BASE64
    size = len(content.rstrip("=")) * bytes_ // characters
    known = [name, media_type, f"{size:,} bytes" if content else ""]
    return f"[A document, which this model cannot read: {', '.join(filter(None, known))}]"


class RefusedParameter(NamedTuple):
    """Why endpoints reject a parameter; without endpoints, why it has no effect."""

    endpoints: Endpoints
    accepted: tuple[Any, ...]
    """Values that are accepted, because they request nothing."""
    reason: str
    """Sentences that give the reason and what to use instead; names are in single quotes."""

    @property
    def accepted_json(self) -> str:
        """The accepted values as JSON; empty if only those that request nothing for any are."""
        return " or ".join(map(shown, self.accepted))

    @property
    def markdown(self) -> str:
        """The reason as Markdown."""
        return re.sub(r"'(\w[\w.]*)'", r"`\1`", self.reason)

    def accepts(self, value: object) -> bool:
        """Return whether a value is accepted, or requests nothing."""
        is_on = any(each is True for each in self.accepted)
        return _is_one_of(value, (*_NOTHING, *self.accepted, *[False] * (not is_on)))

    def check(self, name: str, value: object) -> None:
        """Raise UnsupportedParameterError for a value that is not accepted."""
        if self.accepts(value):
            return
        message = f"'{name}' is not supported. {self.reason}"
        if self.accepted:
            message = (
                f"'{name}' must be {self.accepted_json}; other values are not supported. "
                f"Given: {shown(value)}. {self.reason}"
            )
        raise UnsupportedParameterError(message, param=name)


_TABLE: Final = """
all: adapter lora lora_path
  = A request cannot load weights. Name a model that has them as 'model'.
both: adaptive_target=-1
  = The sampler chain has no adaptive-p step. Use 'mirostat'.
both: audio image_config images_config modalities=["text"]
  = Models return only text.
both: bootstrap_host bootstrap_port bootstrap_room ec_transfer_params kv_transfer_params
  = Only the engine's operator configures transfers of its cache.
both: container context_management mcp_servers session_params
  = The server runs no tools and keeps no conversations. Send the whole prompt or conversation,
  and offer 'tools'.
both: custom_logit_processor custom_params logits_processor logits_processors vllm_xargs
  = Only the engine's operator configures its extensions. Use named parameters.
both: documents
  = Put the documents into the prompt or the messages, or offer 'tools'.
both: ebnf guided_grammar
  = Use 'structured_outputs.grammar'.
both: grammar_lazy grammar_triggers
  = A 'grammar' applies from the first token. Use 'tools' to constrain calls only.
both: guided_choice
  = Use 'structured_outputs.choice'.
both: guided_decoding_backend
  = All constraints are compiled by one backend. Omit the parameter.
both: guided_json
  = Use 'structured_outputs.json'.
both: guided_json_object
  = Use 'structured_outputs.json_object'.
both: guided_regex regex
  = Use 'structured_outputs.regex'.
both: guided_whitespace_pattern structured_outputs.whitespace_pattern
  = Constrained JSON has at most one space after each comma and colon. Otherwise use 'grammar'.
both: input_embeds input_ids inputs prompt_embeds
  = Prompts are text or token ids. Use 'prompt' (in chats 'messages').
both: length_penalty=1
  = It belongs to beam search, which is not available.
both: logprob_token_ids
  = Use 'logprobs' (in chats 'top_logprobs') for the likeliest tokens.
both: max_new_tokens max_output_tokens max_tokens_to_sample num_predict
  = Use 'max_tokens'.
both: do_sample=true
  = Use 'temperature' 0 for the likeliest tokens.
both: format
  = Use 'response_format'.
both: guardrails safe_prompt
  = Nothing is added to prompts, and texts are not moderated. Write it into 'prompt' or 'messages'.
both: options parameters
  = Parameters are members of the body itself.
both: random_seed sampling_seed
  = Use 'seed'.
both: repetition_context_size
  = Use 'repeat_last_n'.
both: return_full_text
  = Use 'echo'.
both: top_n_tokens
  = Use 'logprobs' (in chats 'top_logprobs').
both: truncate
  = Use 'truncate_prompt_tokens'.
both: media_io_kwargs
  = Images are decoded in one way for all requests. Resize them before the request.
both: min_new_tokens=0
  = Use 'min_tokens'.
both: max_dynamic_patch min_dynamic_patch mm_payload mm_processor_kwargs use_audio_in_video
  = Only the model's operator configures its image processor.
both: max_price preset provider
  = One request runs one model of this server. Name it as 'model'.
both: moderation safety_model
  = Texts are not moderated. Moderate them in another service.
both: n_indent=0
  = Indentation is not enforced. Use a 'grammar'.
both: no_stop_trim
  = Use 'include_stop_str_in_output'.
both: output_config output_format
  = Use 'response_format' (in chats also 'reasoning_effort').
both: enable_search plugins search_parameters web_search_options
  = Nothing searches the web here, and no plugins run. Offer a search as one of the 'tools'.
both: post_sampling_probs
  = Use POST /completion in dialect llamacpp, or 'logprobs' for the model's own.
both: prediction speculation
  = It cannot speed up the response here. Without it, the response is the same.
all: priority=0
  = Use 'service_tier'.
both: image_data prompt.multimodal_data
  = Use 'images' (in chats 'messages').
both: prompt_truncate_len transforms
  = Use 'truncate_prompt_tokens', which cuts tokens and not whole messages.
both: detokenize=true include_routing_matrix raw_output return_hidden_states return_meta_info
  return_mm_kwargs return_prompt_text return_prompt_token_ids return_routed_experts
  return_token_offsets
  = A response has texts, token ids and log-probabilities. Use 'return_token_ids' and 'logprobs'.
both: reasoning_history
  = Omit from 'messages' or 'prompt' the reasoning that the model should not see.
both: response_fields
  = Use POST /completion in dialect llamacpp; other responses have all fields.
both: spaces_between_special_tokens=true
  = Special tokens are separated as the tokenizer does it. Use 'skip_special_tokens'.
both: stop_regex
  = Use 'stop', or a 'structured_outputs.regex' that ends where the text should end.
both: stop_seqs stop_sequences stop_strings
  = Use 'stop'.
both: store
  = Responses are kept by 'background' or the header Idempotency-Key; nothing else is stored.
both: structural_tag structured_outputs.structural_tag
  = Use 'tools' with 'strict' for calls, and 'grammar' for other texts.
both: system
  = Put it at the beginning of 'prompt', or into 'messages' as one of role system.
both: top_a=0
  = Use 'min_p'.
both: early_stopping num_beams=1 use_beam_search
  = In completions, 'best_of' returns the likeliest of several samples.
both: watermark watermarking
  = The sampler has no watermarks.
chats: add_special_tokens
  = The model's chat template writes the special tokens.
chats: best_of=1
  = Use 'n' with 'logprobs', and choose among the choices.
chats: chat_template role_mapping
  = The model's own template renders the messages. Set its variables with 'chat_template_kwargs',
  or render the prompt yourself for POST /v1/completions.
chats: echo echo_last=0
  = A chat's prompt is not returned. Use POST /v1/completions.
chats: images
  = Put images into 'messages', as parts of type image_url.
chats: chat_format chat_parser generation_prompt parse_tool_calls=true
  = Calls of 'tools' are always parsed. Use POST /v1/completions for text as the model writes it.
chats: prompt
  = Use 'messages', or POST /v1/completions.
chats: messages[]:assistant.audio
  = Send its text in 'messages'.
chats: messages[]:assistant.prefix
  = Use 'continue_final_message', or 'partial' in the message.
chats: reasoning.generate_summary reasoning.summary thinking.display
  = Reasoning is returned whole; 'include_reasoning' false hides it.
chats: reasoning.enable reasoning.reasoning_effort
  = Use 'reasoning.enabled' and 'reasoning.effort'.
chats: reasoning_budget_message
  = Reasoning ends without a message. Use 'thinking_budget'.
chats: reasoning_format="auto"|"deepseek" reasoning_in_content separate_reasoning=true
  stream_reasoning=true thinking_forced_open
  = Reasoning is always separate from the content; 'include_reasoning' false hides it.
chats: think
  = Use 'enable_thinking'.
chats: task
  = Describe the task in 'messages'.
chats: suffix
  = Use POST /v1/completions.
completions: add_generation_prompt=true chat_template_kwargs continue_final_message enable_thinking
  include_reasoning=true messages reasoning reasoning_budget_tokens=-1 reasoning_effort thinking
  thinking_budget=-1 thinking_token_budget=-1 verbosity="medium"
  = The text of a completion is the prompt's continuation as it is. Use POST /v1/chat/completions.
completions: function_call="none"|"auto"
  = Use 'tool_choice'.
completions: functions
  = Use 'tools'.
pooling: background stream
  = The response comes as a whole.
pooling: chat_template
  = The model's own template renders texts. Set its variables with 'chat_template_kwargs'.
pooling: embed_dtype="float32" embedding_type="float" embedding_types=["float"]
  endianness="native"|"little" output_dtype="float"|"float32"
  = Vectors have float32 numbers, little-endian in base64. Convert them yourself.
pooling: image images media_io_kwargs mm_processor_kwargs
  = The models read text only.
pooling: input_type task="embed"|"classify"
  = Write the task's instruction into each text.
pooling: late_chunking
  = Texts are read one by one.
pooling: max_chunks_per_doc
  = Use 'max_tokens_per_doc'.
pooling: normalize=true
  = Use 'use_activation'.
pooling: output_dimension
  = Use 'dimensions'.
pooling: padding="do_not_pad"
  = Texts are not padded.
pooling: rank_fields
  = Send each of 'documents' as a text, or as an object with a 'text'.
pooling: truncate="NONE"
  = Use 'truncate_prompt_tokens' and 'truncation_side'.
responses: content[]:input_image.file_id
  = Files are not read from their ids. Send the image itself as image_url.
responses: content[]:input_file.file_id
  = Files are not read from their ids. Send the text of the file.
chats: content[]:file.file.file_id
  = Files are not read from their ids. Send the text of the file in 'messages'.
responses: reasoning.context="auto"|"all_turns"
  = Omit from 'input' the reasoning that the model should not see.
responses: personality
  = Write the style into 'instructions'.
responses: prompt_cache_options.prewarm
  = A request always generates. To fill the cache, send the prompt with 'max_tokens' 1.
both: prompt_cache_options.prewarm
  = A request always generates. To fill the cache, send the prompt with 'max_tokens' 1.
responses: reasoning.mode="standard"
  = Reasoning has one mode. Use 'reasoning.effort'.
messages: content[]:document.citations={"enabled":false}
  content[]:search_result.citations={"enabled":false}
  = Texts come without citations. Ask for quotes in 'messages'.
messages: content[]:image.transformations={"oversized_image":"downsize"}
  = The model's processor scales images. Scale them before the request.
messages: compaction
  = Conversations are not summarized here. Ask for a summary in 'messages'.
messages: container mcp_servers
  = The server runs no tools and keeps no files. Offer 'tools' that the client runs.
messages: messages[].output_config
  = Effort is that of the whole request. Use 'output_config'.
messages: thread
  = Conversations are not kept. Send all 'messages'.
none: content[]:text.prompt_cache_breakpoint content[]:image_url.prompt_cache_breakpoint
  content[]:input_text.prompt_cache_breakpoint content[]:input_image.prompt_cache_breakpoint
  content[]:input_file.prompt_cache_breakpoint content[]:file.prompt_cache_breakpoint
  = Requests with a common prefix share cached work automatically.
none: output_config.task_budget response_format:wrapper.description text.format.description
  = The template has no place for it. To advise the model, write it into the messages.
none: thinking.block_binding
  = Reasoning that cannot be opened is left out and named.
none: content[]:image_url.image_url.detail="auto"|"high"|"original"
  content[]:input_image.detail="auto"|"high"|"original"
  = The model's processor decides how much of an image the model sees. Scale it before the request.
none: tools[].allowed_callers=["direct"] tools[]:function.allowed_callers=["direct"]
  tools[]:custom.allowed_callers=["direct"] tools[]:shell.allowed_callers=["direct"]
  tools[]:shell.environment={"type":"local"} tools[]:function.async tools[]:custom.async
  tools[]:function.output_schema
  = The model calls tools directly, and the client runs them.
none: access_programs adaptive_decay backend_sampling billing_policy cache_control compliance
  custom_labels data_parallel_rank debug diagnostics disagg_prefill_dp_rank extra_key
  fallback_credit_token fallbacks id_slot image inference_geo metadata n_cache_reuse n_discard
  n_keep ngram_corpus_id prompt_cache_key prompt_cache_max_len prompt_cache_options
  prompt_cache_options.mode prompt_cache_options.ttl prompt_cache_retention request_id
  return_cached_tokens_details rid route routed_dp_rank routed_experts_prompt_start
  routed_experts_start_len safety_identifier session_id sse_ping_interval
  stream_interval trace usage verbose
  = They concern caches, slots, logs, labels and routes of other servers.
"""
"""Endpoints and names, with the accepted values as JSON, and the reason after `=`."""


def _rows() -> Iterable[tuple[str, RefusedParameter]]:
    for row in re.split(r"\n(?! )", _TABLE.strip()):
        head, reason = " ".join(row.split()).split(" = ")
        endpoints, *names = head.split()
        for each in names:
            name, *accepted = re.split("[=|]", each)
            values = tuple(map(json.loads, accepted))
            yield name, RefusedParameter(Endpoints[endpoints[:-1].upper()], values, reason)


ROWS: Final = tuple(_rows())
"""The documented parameters of other APIs that the gateway rejects or that have no effect. Pooling
models have rows of their own, also for names that completions have."""
PARAMETERS: Final = {
    name: row for name, row in ROWS if row.endpoints & Endpoints.BOTH or not row.endpoints
}
"""The rows of completions and chats."""


def rejected_by(endpoint: Endpoints) -> dict[str, RefusedParameter]:
    """Return the parameters that an endpoint rejects, without those inside of objects."""
    return {name: row for name, row in ROWS if endpoint & row.endpoints and "." not in name}


REJECTED: Final = rejected_by(Endpoints.COMPLETIONS)
REJECTED_BY_CHATS: Final = rejected_by(Endpoints.CHATS)
REJECTED_BY_POOLING: Final = rejected_by(Endpoints.POOLING)
REJECTED_BY_MESSAGES: Final = rejected_by(Endpoints.MESSAGES)


def unread(
    entries: Mapping[str, Any] | None, rejected: Mapping[str, RefusedParameter] = PARAMETERS
) -> list[str]:
    """Return the names of a body's entries that have no effect.

    Raises UnsupportedParameterError for a rejected one.
    """
    ignored: list[str] = []
    for name, value in (entries or {}).items():
        if (row := rejected.get(name)) is not None and row.endpoints:
            row.check(name, value)
        elif value is not None:
            ignored.append(name)
    return ignored


def is_nothing(value: object) -> bool:
    """Return whether a value requests nothing, for every parameter."""
    return _is_one_of(value, (*_NOTHING, False))


def _is_one_of(value: object, values: tuple[Any, ...]) -> bool:
    # False == 0 in Python, but 0 may request something where false does not.
    is_bool = isinstance(value, bool)
    return any(value == other and isinstance(other, bool) is is_bool for other in values)


def ignored_header(names: Iterable[str]) -> dict[str, str]:
    """Return the header for parameters without effect, empty without any."""
    safe = ",".join(shown_names(names))
    return {IGNORED_HEADER: safe} if safe else {}


def shown_names(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names that the header has: the client chooses them, so they must be safe."""
    safe = tuple(islice(filter(_SAFE_NAME.fullmatch, names), MAX_NAMED))
    ends = accumulate(len(name) + 1 for name in safe)
    return tuple(compress(safe, (end <= _MAX_HEADER_CHARACTERS for end in ends)))


def reject_ignored(names: Sequence[str]) -> None:
    """Raise UnknownParameterError if `names`, the parameters without effect, is not empty."""
    if names:
        first = names[0][:MAX_SHOWN_CHARACTERS]
        raise UnknownParameterError(
            f"'{first}' is unknown or has no effect; this account rejects such parameters.",
            param=first,
        )


class Need(StrEnum):
    """What a parameter requires of a model; the values appear in error messages."""

    SAMPLER_CHAIN = "an engine with the sampler chain"
    STRUCTURE = "an engine with structured output"
    IMAGES = "a model with image input"
    INFILL = "a model with infill tokens"
    TOOLS = "a model with a tool call format"
    CHAT = "a model with a chat template"
    CALLS = "a model with a tool call parser"
    REASONING = "a model with a reasoning parser"
    THINKING_BUDGET = "an engine with reasoning budgets"


_NEEDED: Final[Mapping[Need, str]] = {
    Need.SAMPLER_CHAIN: "mirostat mirostat_tau mirostat_eta mirostat_target mirostat_lr "
    "xtc_probability xtc_threshold dry_multiplier dry_base dry_allowed_length dry_penalty_last_n "
    "dry_sequence_breakers dynatemp_range dynatemp_exponent typical_p top_n_sigma min_keep "
    "samplers repeat_last_n",
    Need.STRUCTURE: "grammar grammar_syntax json_schema response_format structured_outputs",
    Need.IMAGES: "images",
    Need.INFILL: "suffix",
    Need.CALLS: "tools tool_choice parallel_tool_calls functions function_call",
    Need.REASONING: "include_reasoning",
    Need.THINKING_BUDGET: "thinking_budget thinking_token_budget reasoning_budget_tokens",
}
NEEDS: Final = {name: need for need, names in _NEEDED.items() for name in names.split()}
"""Parameters that not every model supports. In completions, calls need `Need.TOOLS` instead."""

_FEATURES: Final = {
    Feature.SAMPLER_CHAIN: Need.SAMPLER_CHAIN,
    Feature.STRUCTURE: Need.STRUCTURE,
    Feature.IMAGES: Need.IMAGES,
    Feature.CHAT: Need.CHAT,
    Feature.TOOLS: Need.CALLS,
    Feature.REASONING: Need.REASONING,
    Feature.THINKING_BUDGET: Need.THINKING_BUDGET,
}


def supported_parameters(
    names: Iterable[str], features: Iterable[Feature], *, has_infill: bool, has_tools: bool
) -> list[str]:
    """Return the parameters of a completion that a model supports, in alphabetical order."""
    met = _met(features, has_infill=has_infill, has_tools=has_tools) - {Need.CALLS}
    return _supported(names, met | {Need.CALLS} if has_tools else met)


def supported_chat_parameters(names: Iterable[str], features: Iterable[Feature]) -> list[str]:
    """Return the parameters of a chat that a model supports; none without a chat template."""
    met = _met(features)
    return _supported(names, met) if Need.CHAT in met else []


def _supported(names: Iterable[str], met: set[Need]) -> list[str]:
    return sorted(name for name in names if name not in NEEDS or NEEDS[name] in met)


def check_supported(
    request: GenerationRequest,
    features: Collection[Feature],
    *,
    has_infill: bool = False,
    has_tools: bool = False,
    max_images: int | None = None,
) -> GenerationRequest:
    """Return the request in a form that the model can serve.

    Raises a BadRequestError if the model cannot serve it.

    The result drops at most three things. One is a convention of the dialect: if an engine has no
    sampler chain, plain sampling follows the engine's own order. The others become ignored
    parameters: the reasoning budget of a model that does not reason, and what tools of an agent
    show to a model without vision. `has_infill` and `has_tools` concern completions only.
    `max_images` limits the images of one prompt.
    """
    chat = request.chat
    if chat and chat.image_sources and request.form_options and Feature.IMAGES not in features:
        request = _without_images_of_tools(request, chat)
    asked, sampling = [*_asked(request)], request.sampling
    # Most completions need no feature.
    if not asked and sampling.chain is None and sampling.thinking_budget is None:
        return request
    met = _met(features, has_infill=has_infill, has_tools=has_tools)
    for param, need in asked:
        if need not in met:
            raise _unsupported(param, need)
    given = _image_count(request)
    if max_images is not None and given > max_images:
        param = "images" if request.chat is None else request.chat.param
        raise must(param, f"have at most {max_images} images per prompt of this model", given)
    if request.sampling.chain is not None and Need.SAMPLER_CHAIN not in met:
        sampling = msgspec.structs.replace(request.sampling, chain=None)
        request = msgspec.structs.replace(request, sampling=sampling)
    if request.sampling.thinking_budget is None or request.chat is None:
        return request
    if Need.THINKING_BUDGET in met:
        return _with_reasoning(request, request.chat)
    if Need.REASONING in met and request.form is not ResponseForm.MESSAGES:
        raise _unsupported(request.chat.thinking_budget_param, Need.THINKING_BUDGET)
    return without_thinking_budget(request, request.chat)


def _without_images_of_tools(request: GenerationRequest, chat: ChatRequest) -> GenerationRequest:
    """Replace the images in results of tools by a text, so that they do not end a session."""
    sources = iter(chat.image_sources)
    seen = [each for each in chat.image_sources if not each.is_of_tool]
    if len(seen) == len(chat.image_sources):
        return request

    def shown(part: dict[str, str]) -> dict[str, str]:
        is_unseen = part["type"] == "image" and next(sources).is_of_tool
        return {"type": "text", "text": UNSEEN_IMAGE} if is_unseen else part

    messages = [
        {**each, "content": [shown(part) for part in each["content"]]}
        if isinstance(each["content"], list)
        else each
        for each in chat.messages
    ]
    return msgspec.structs.replace(
        request,
        chat=replace(chat, messages=messages, image_sources=seen),
        ignored_parameters=tuple(sorted({*request.ignored_parameters, f"{chat.param}.image"})),
    )


def _met(
    features: Iterable[Feature], *, has_infill: bool = False, has_tools: bool = False
) -> set[Need]:
    found = ((Need.INFILL, has_infill), (Need.TOOLS, has_tools))
    met = (_FEATURES[each] for each in features if each in _FEATURES)
    return {*met, *(need for need, has in found if has)}


def _with_reasoning(request: GenerationRequest, chat: ChatRequest) -> GenerationRequest:
    """Return a request whose bound on reasoning turns reasoning on, unless the client decides."""
    if not request.sampling.thinking_budget or not chat.template_arguments.keys().isdisjoint(
        SWITCHES
    ):
        return request
    arguments = chat.template_arguments | dict.fromkeys(SWITCHES, True)
    return msgspec.structs.replace(request, chat=replace(chat, template_arguments=arguments))


def without_thinking_budget(request: GenerationRequest, chat: ChatRequest) -> GenerationRequest:
    """Return a request whose bound on reasoning has no effect, and is named so."""
    ignored = {*request.ignored_parameters, chat.thinking_budget_param}
    return msgspec.structs.replace(
        request,
        sampling=msgspec.structs.replace(request.sampling, thinking_budget=None),
        ignored_parameters=tuple(sorted(ignored)),
    )


def _unsupported(param: str, need: Need) -> UnsupportedParameterError:
    return unsupported(param, f"is not supported by this model. It requires {need}.")


def _asked(request: GenerationRequest) -> Iterable[tuple[str, Need]]:
    if request.structure is not None:
        yield request.structure.param, Need.STRUCTURE
    yield from _asked_of_completions(request) if request.chat is None else _asked_of_chats(request)
    if request.sampling.chain is not None:
        for param in _chain_parameters(request.sampling.chain, request.profile):
            yield param, Need.SAMPLER_CHAIN


def _asked_of_completions(request: GenerationRequest) -> Iterable[tuple[str, Need]]:
    if request.tool_use is not None:
        yield "tools", Need.TOOLS
        if request.tool_use.is_constraint:
            yield "tools", Need.STRUCTURE
    if any(request.images):
        yield "images", Need.IMAGES
    if request.infill_param:
        yield request.infill_param, Need.INFILL


def _asked_of_chats(request: GenerationRequest) -> Iterable[tuple[str, Need]]:
    param = request.chat.param if request.chat else ""
    yield param, Need.CHAT
    if _image_count(request):
        yield param, Need.IMAGES
    if request.tool_use is not None:
        yield request.tools_param, Need.CALLS
        if request.tool_use.is_forced:
            yield request.tool_choice_param, Need.STRUCTURE


def _chain_parameters(chain: SamplerChain, profile: Profile) -> list[str]:
    """Return the parameters that requested the chain; empty if only the dialect requires it."""
    asked = {
        "mirostat": chain.mirostat is not None,
        "post_sampling_probs": chain.reports_probabilities,
        "xtc_probability": chain.xtc is not None,
        "dry_multiplier": chain.dry is not None,
        "typical_p": chain.typical_p < 1.0,
        "top_n_sigma": chain.top_n_sigma > 0.0,
        "dynatemp_range": chain.dynatemp_range > 0.0,
        "min_keep": chain.min_keep > 1,
        "samplers": chain.mirostat is None and tuple(chain.order) != DEFAULT_SAMPLERS,
        "repeat_last_n": not chain.mirostat and chain.penalty_last_n != profile.penalty_last_n,
    }
    return [param for param, is_asked in asked.items() if is_asked]


def _image_count(request: GenerationRequest) -> int:
    """Return the highest image count of any prompt; for a chat, images to be fetched count too."""
    unfetched = len(request.chat.image_sources) if request.chat else 0
    return max([unfetched, *map(len, request.images)])
