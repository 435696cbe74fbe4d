"""JSON schemas of the generation API's responses, and of requests and headers without a model.

The gateway renders these responses as dictionaries, without models: it does it for every token.
"""

import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, Final

from contract.dialect import Dialect
from contract.tier import ServiceTier
from gateway.dialects.json_types import Schema, reference, schema_of
from gateway.dialects.native import MAX_FILES
from gateway.records.limits import LimitScope

_TABLE: Final = """
FunctionCall = {"name": str, "arguments": str}
ToolCall = {"id": str, "type": "function", "function": FunctionCall}
PromptTokensDetails = {"cached_tokens": int}
CompletionTokensDetails
  best_of_tokens?: int  # Tokens that `best_of` discarded.
  reasoning_tokens?: int  # Reasoning tokens of chats.
Usage
  prompt_tokens: int
  completion_tokens: int  # Tokens of all sequences, including those that `best_of` discarded.
  total_tokens: int; prompt_tokens_details?: PromptTokensDetails
  completion_tokens_details?: CompletionTokensDetails
  cached_tokens?: int  # In dialect `omlx`.
  cost?: float  # Cost in dollars, if the account or the request enables it.
PromptToken
  logprob: float
  rank: int  # 1 is the likeliest.
  decoded_token: str
PromptTokens = dict[str, PromptToken]
  # By token id: the prompt's token first, then the likeliest.
PromptLogprobs = list[PromptTokens | None]  # With `prompt_logprobs`; null for the first token.
PromptProgress  # With `return_progress`, before the first token.
  total: int; cache: int; processed: int; time_ms: int
_Named
  created: int  # Unix time in seconds.
  model: str  # The model as the request named it.
_Optional
  system_fingerprint?: str
  service_tier?: tier  # The tier that runs the request, if it has a `service_tier`.
  timings?: dict  # In dialect `llamacpp`.
  perf_metrics?: dict | None  # In dialect `fireworks`, with `perf_metrics_in_response`.
  metrics?: dict | None  # In dialect `vllm`.
_Streamed
  usage?: Usage | None
  obfuscation?: str  # Padding, with `include_obfuscation`.
  prompt_progress?: PromptProgress
CompletionLogprobs
  tokens: list[str]
  token_logprobs: list[float | None]  # Null for the first token of an echoed prompt.
  top_logprobs: list[dict[str, float] | None]
  text_offset: list[int[0:]]  # Code points of the returned text before the token.
  token_ids?: list[int[0:]]
_Stop
  stop_reason?: str | int | None
    # The stop string, or the id of the stop token, that ended the choice.
  token_ids?: list[int[0:]]  # With `return_token_ids`.
CompletionChoice
  index: int  # prompt index * n + choice
  text: str; logprobs: CompletionLogprobs | PlacedLogprobs | None
  finish_reason: "stop" | "length" | "tool_calls" | None
    # Null in a stream until the choice ends.
  +_Stop
  prompt_token_ids?: list[int[0:]]  # With `return_token_ids`.
  prompt_logprobs?: PromptLogprobs; tool_calls?: list[ToolCall]
_Completion
  id: match("^cmpl-"); object: "text_completion"; +_Named; choices: list[CompletionChoice]
Completion
  +_Completion; usage: Usage; +_Optional
CompletionChunk  # One `data:` line of a stream.
  +_Completion; +_Optional; +_Streamed
CompletionStatus
  id: match("^((chat)?cmpl-|msg_)")
  object: "text_completion" | "chat.completion" | "message"; +_Named
  background: bool
  status: "queued" | "in_progress" | "completed" | "failed" | "cancelled" | "incomplete"
    # `incomplete`: its client disconnected; reading it resumes it.
  error?: dict  # The error of a failed completion, as in `Error`.
CompletionEstimate
  object: "completion.estimate"; model: str; dialect: dialect
  prompt_tokens: int  # Tokens of all prompts, after truncation.
  prompt_truncated: int  # Truncated prompt tokens.
  max_tokens: int  # The lowest effective value of any prompt.
  completion_tokens_max: int
    # Maximum tokens to generate, including those that `best_of` discards.
  total_tokens_max: int
  parameters: dict  # Effective parameters, including defaults.
  ignored_parameters: list[str]; context_window: int; service_tier: tier; cost: EstimatedCost
  limits: dict[str, int | dict]
    # Limits of the server, and those of `key`, `project` and `tenant`.
EstimatedCost  # Micro-dollars.
  prompt_micros: int  # Cost of the prompt alone.
  max_micros: int  # Maximum cost.
ChatAlternative
  token: str; logprob: float
  bytes: list[int[0:255]]  # The token's text in UTF-8; of an incomplete character its own bytes.
ChatToken
  +ChatAlternative; top_logprobs: list[ChatAlternative]
ChatLogprobs = {"content": list[ChatToken], "refusal": None}
PlacedAlternative
  +ChatAlternative; token_id: int[0:]
PlacedToken
  +PlacedAlternative; text_offset: int[0:]; top_logprobs: list[PlacedAlternative]
PlacedLogprobs  # In dialect `fireworks-2026`, with `logprobs` true.
  content: list[PlacedToken]
_Reasoning
  reasoning_content?: str | None
    # The model's reasoning; dialect `vllm` has it as `reasoning` too.
  reasoning?: str | None
TextCall
  name: str
  input: str  # The text that a tool of type custom gets.
ChatToolCall  # Has the member that its `type` names.
  id: str; type: "function" | "custom"; function?: FunctionCall; custom?: TextCall
ChatMessage
  role: "assistant"
  content: str | None  # Null if the message has only calls.
  refusal: None; +_Reasoning; tool_calls?: list[ChatToolCall] | None
  function_call?: FunctionCall  # For requests with `functions`.
FunctionCallPart = {"arguments": str, "name?": str}
TextCallPart = {"input": str, "name?": str}
ToolCallPart  # Only the first part of a call has `id`, `type` and the tool's name.
  index: int; function?: FunctionCallPart; custom?: TextCallPart; id?: str
  type?: "function" | "custom"
ChatDelta  # The first delta of a choice has the role; the last is empty.
  role?: "assistant"; content?: str | None; +_Reasoning; tool_calls?: list[ToolCallPart]
  function_call?: FunctionCallPart
_ChatEnd
  logprobs: ChatLogprobs | None
  finish_reason: "stop" | "length" | "tool_calls" | "function_call" | None
    # Null in a stream until the choice ends.
  +_Stop
  prompt_token_ids?: list[int[0:]]
    # With `return_token_ids`; dialect `vllm` has it beside `choices`.
ChatChoice
  index: int; message: ChatMessage; +_ChatEnd
ChatChunkChoice
  index: int; delta: ChatDelta; +_ChatEnd
_Chat
  prompt_token_ids?: list[int[0:]]
    # In dialect `vllm`, with `return_token_ids`; in a stream, in first chunks.
  prompt_logprobs?: PromptLogprobs; +_Optional
ChatCompletion
  id: match("^chatcmpl-"); object: "chat.completion"; +_Named; choices: list[ChatChoice]
  usage: Usage; +_Chat
ChatCompletionChunk  # One `data:` line of a stream.
  id: match("^chatcmpl-"); object: "chat.completion.chunk"; +_Named; choices: list[ChatChunkChoice]
  +_Chat; +_Streamed
MessageUsage
  input_tokens: int  # Prompt tokens that were not cached.
  cache_creation_input_tokens: 0
  cache_read_input_tokens: int  # Cached prompt tokens.
  output_tokens: int  # Tokens of the message, including thinking.
  output_tokens_details: dict  # `thinking_tokens`: those of thinking.
  service_tier: str  # The tier that ran the request; `standard` is `default`.
  cost?: float  # Cost in dollars, if the account or the request enables it.
MessageBlock
  type: "text" | "thinking" | "tool_use"
  text?: str; thinking?: str
  signature?: str  # Of thinking: the reasoning, sealed. Send the block back as it is.
  id?: match("^toolu_"); name?: str
  input?: Any  # Of a call: its arguments.
Message
  id: match("^msg_"); type: "message"; role: "assistant"; model: str; content: list[MessageBlock]
  stop_reason: stop
  stop_sequence: str | None  # The stop sequence that ended the message.
  usage: MessageUsage
  context_management?: dict  # `applied_edits`, if the request has `context_management`.
  diagnostics?: dict | None  # `cache_miss_reason`, if the request has `diagnostics`.
MessageTokens
  input_tokens: int  # Tokens of the prompt, as they would be billed.
MessageBatchRequest = {"custom_id": match("^[a-zA-Z0-9_-]{1,64}$"), "params": MessageRequest}
MessageBatchCreation = {"requests": list[MessageBatchRequest, 1:]}
MessageBatch  # Until it has ended, all of its requests are `processing`. Times are RFC 3339.
  id: match("^msgbatch_"); type: "message_batch"
  processing_status: "in_progress" | "canceling" | "ended"
  request_counts: dict[str, int]  # `processing`, `succeeded`, `errored`, `canceled`, `expired`.
  created_at: str; expires_at: str; cancel_initiated_at: str | None; ended_at: str | None
  archived_at: str | None  # When its results were deleted.
  results_url: str | None  # Of its end on; a path, if there is no `SLUICE_PUBLIC_URL`.
MessageBatchList  # Newest first.
  data: list[MessageBatch]; has_more: bool; first_id: str | None; last_id: str | None
DeletedMessageBatch = {"id": match("^msgbatch_"), "type": "message_batch_deleted"}
MessageFailureText
  type: str; message: str
  details?: dict  # Of a rejected `thread`: the `error_code` that clients read.
MessageFailure
  type: "error"; error: MessageFailureText
  request_id?: match("^req_")  # The same as the header `request-id`.
ResponseItem
  type: str; id: str
  status?: "in_progress" | "completed" | "incomplete"
ResponseFailure = {"code": str, "message": str}
ResponseUsage
  input_tokens: int; output_tokens: int; total_tokens: int
  input_tokens_details: dict; output_tokens_details: dict
  cost?: float  # Cost in dollars, if the account or the request enables it.
Response
  id: match("^resp_"); object: "response"; created_at: int; model: str
  completed_at: int | None  # When it was completed.
  service_tier: tier  # The tier that ran the request.
  status: "queued" | "in_progress" | "completed" | "failed" | "cancelled" | "incomplete"
  output: list[ResponseItem]
  error: ResponseFailure | None
  incomplete_details: dict | None
  usage: ResponseUsage | None
  prompt_cache_diagnostics?: dict | None  # With `comparison_response_id`.
  tools: list; tool_choice: Any; parallel_tool_calls: bool
  presence_penalty: float; frequency_penalty: float
ResponseItems
  object: "list"; data: list[ResponseItem]; has_more: bool
  first_id: str | None; last_id: str | None
ResponseTokens
  object: "response.input_tokens"
  input_tokens: int  # Tokens of the prompt, as they would be billed.
DeletedResponse = {"id": match("^resp_"), "object": "response", "deleted": bool}
SpeechUsage
  type: "duration"
  seconds: int  # Length of the audio, rounded up.
  cost?: float  # Cost in dollars, if the account or the request enables it.
SpeechSegment  # Times are in seconds.
  id: int; seek: int; start: float; end: float; text: str; tokens: list[int[0:]]
  temperature: float; avg_logprob: float; compression_ratio: float
  no_speech_prob: float  # Always 0: models do not report it.
Transcription
  text: str; usage: SpeechUsage
  task?: "transcribe" | "translate"  # This and the following in format `verbose_json`.
  language?: str  # The code of ISO 639-1.
  duration?: float  # Seconds.
  segments?: list[SpeechSegment]
Translation = Transcription
PooledUsage
  prompt_tokens: int  # Tokens of all texts.
  total_tokens: int
  cost?: float  # Cost in dollars, if the account or the request enables it.
_Pooled
  object: "list"; +_Named; system_fingerprint: str
  service_tier?: tier  # The tier that runs the request, if it has a `service_tier`.
  usage: PooledUsage
Embedding
  object: "embedding"
  index: int  # Index of the text in `input`.
  embedding: list[float] | str  # A text in base64, if the request asks for it.
Embeddings
  id: match("^embd-"); +_Pooled; data: list[Embedding]
Label
  index: int  # Index of the text in `input`.
  label: str  # The likeliest label.
  probs: list[float]  # One for each label of the model.
  num_classes: int
Labels
  id: match("^classify-"); +_Pooled; data: list[Label]
Score
  index: int  # Index of the document.
  object: "score"; score: float
Scores
  id: match("^score-"); +_Pooled; data: list[Score]
RankedDocument = {"text": str}
Rank
  index: int  # Index of the document in `documents`.
  relevance_score: float
  document?: RankedDocument  # With `return_documents`.
Ranking
  id: match("^rerank-"); +_Pooled
  results: list[Rank]  # The best first.
  meta: dict  # The token counts, as in Cohere's API.
AvailabilityInError  # Of a model that cannot run a request now.
  reason: str  # The code of the error, `queue_full` or `wait_too_long`.
  model: str; tier: tier
  position: int | None  # The place in the queue that the request would have got.
  estimated_wait_seconds: float | None  # Null if it is unknown.
_ErrorText
  message: str; type: str; availability?: AvailabilityInError
OpenAIError
  +_ErrorText; param: str | None; code: str | None
  limit?: str  # Name of the limit that rejected the request.
  scope?: scope; limit_value?: hidden; used?: hidden
  reset_seconds?: float | None
    # Seconds until the limit allows the request; null if never or unknown.
LlamacppError
  +_ErrorText; code: int; n_prompt_tokens?: int; n_ctx?: int
VllmError
  +_ErrorText; param: str | None; code: int
Error  # `code` is a word, or the HTTP status in dialects `llamacpp` and `vllm`.
  error: OpenAIError | LlamacppError | VllmError
TokenPiece = {"id": int, "piece": str | list[int]}
Tokens
  tokens: list[int | TokenPiece]; count?: int; max_model_len?: int; token_strs?: list[str] | None
Detokenized
  prompt?: str  # The text, in dialect `vllm` or if the request names a model.
  content?: str  # The text in all other cases, as in llama.cpp.
NamedTemplate = {"name": str, "template": str}
TokenizerInfo
  tokenizer_class: str; model_max_length: int
  added_tokens_decoder: dict[str, str]  # Texts of the added tokens by token id.
  bos_token?: str
  chat_template?: str | list[NamedTemplate]
    # The template's source; of several templates, each with its name.
ModelMeta  # Sizes of the vocabulary and of the context, as in llama.cpp.
  n_vocab: int; n_ctx: int; n_ctx_train: int
Model
  id: str
  aliases: list[str]  # Other names of the model in requests.
  object: "model"; created: int; owned_by: str
  root: str  # The model; of an adapter, `sha256:` and the digest of its files.
  parent: str | None  # The base model of an adapter; null for other models.
  context_window: int  # Prompt and completion tokens.
  max_model_len: int  # The same, under vLLM's name.
  meta: ModelMeta
  ready: bool  # Whether a worker currently serves it.
  state: "ready" | "sleeping" | "model_loading" | "no_worker"
    # `sleeping`: a request starts a worker and waits for it. `model_loading`: a worker is being
    # started. `no_worker`: requests get 503.
  loading_seconds: int | None
    # Seconds that the last worker took to load the model; null if unknown.
  dialect: dialect; features: list[str]
  tool_parser: str  # vLLM's name of the format of calls; empty if calls are not parsed.
  task: "generate" | "embed" | "classify"  # What the model does with a text.
  endpoints: list[str]  # The paths that serve the model.
  dimensions?: int | None  # Numbers of a vector, if the model embeds.
  has_dimensions?: bool  # Whether shorter vectors can be requested by `dimensions`.
  labels?: list[str]  # The labels of a model that classifies.
  supported_parameters: list[str]
    # Parameters of `POST /v1/completions`, or of the endpoints of a model that generates no text.
  supported_chat_parameters: list[str]
    # Parameters of `POST /v1/chat/completions`; empty if the model has no chat template.
  unsupported_parameters: list[str]
    # Parameters that `POST /v1/completions` rejects for every model.
  unsupported_chat_parameters: list[str]
    # Parameters that `POST /v1/chat/completions` rejects for every model.
  service_tiers: list[tier]  # The tiers in which its requests can run; `batch`: in batches.
  pricing: dict | None
    # Micro-dollars per million tokens, by service tier: `prompt_micros`, `cached_micros`,
    # `completion_micros`.
  resolves_to?: str
    # Of an alias that an operator has defined: the model that runs the requests of this tenant.
  deprecated_at?: time | None  # When this alias got a `sunset_at`.
  sunset_at?: time | None  # When requests for this alias begin to fail.
ModelList = {"object": "list", "data": list[Model]}
_NativeToken = {"id": int, "token": str, "bytes": list[int] | None}
NativeAlternative
  +_NativeToken; logprob: float
NativeLogprob
  +NativeAlternative; top_logprobs: list[NativeAlternative]
NativeProbabilityAlternative
  +_NativeToken; prob: float[0:1]
NativeProbability  # With `post_sampling_probs`.
  +NativeProbabilityAlternative; top_probs: list[NativeProbabilityAlternative]
NativeSettings = dict  # Effective parameters by llama.cpp's names, and `n_ctx`.
_NativeResult
  index: int  # prompt index * n + choice
  id_slot: -1  # Requests have no slots.
  tokens_predicted: int
  completion_probabilities?: list[NativeLogprob | NativeProbability]
    # With `n_probs`, one item for each token; in a stream, of the new tokens.
NativePartialResult
  +_NativeResult; content: str; tokens: list[int[0:]]; stop: False; tokens_evaluated: int
  timings?: dict  # With `timings_per_token`.
  prompt_progress?: PromptProgress
NativeResult
  +_NativeResult
  content: str  # Empty in a stream.
  tokens: list[int[0:]]  # With `return_tokens`; empty in a stream.
  stop: True; model: str
  tokens_evaluated: int  # Tokens of the prompt.
  generation_settings: NativeSettings
  prompt: str  # The text of the prompt's tokens.
  has_new_line: bool
  truncated: bool  # Whether the text ended because the context window is full.
  stop_type: "eos" | "word" | "limit"; stopping_word: str
  tokens_cached: int  # Cached tokens of the prompt.
  timings: dict
NativeResults = list[NativeResult]  # The results of several choices.
NativeResponse = NativeResult | NativeResults
DefaultSettings = {"n_ctx": int, "params": NativeSettings}
Modalities = {"vision": bool, "audio": False}
NativeProps
  default_generation_settings: DefaultSettings
  total_slots: int  # Requests that the ready workers of the model run at once.
  model_alias: str
  model_path: str  # The name of the model.
  modalities: Modalities
  chat_template: str  # Empty if the model has none.
  bos_token: str; eos_token: str; build_info: str; is_sleeping: bool
RenderedPrompt = {"prompt": str}
GatewayStatus = {"status": str}
GatewayLoad = {"server_load": int}
GatewayVersion = {"version": str}
InfillFile = {"text": str, "filename?": str}
_PostSampling
  post_sampling_probs?: bool | None
    # Return probabilities after the samplers instead of the model's own log-probabilities;
    # requires `n_probs`. Default: false.
InfillRequest  # The parameters of `CompletionRequest`, except `suffix` and `images`, and:
  input_prefix: str; input_suffix: str
  input_extra?: files  # Files that precede the prefix as context.
  prompt?: str  # Text after the prefix. Default: empty.
  +_PostSampling
ServerSentEvent
  data: str
  id?: str
    # Id of the response, a colon, and the event's number from 1; only on request (see
    # `X-Event-Ids`).
_RequestHeaders
  X-Api-Dialect?: dialect
    # API for which the client was written; determines defaults and the response format. Default:
    # the dialect of the key, else of the tenant, the model or the server.
  X-Request-Id?: match("^[A-Za-z0-9._-]{1,128}$")
    # Id of the request, returned in the response if it is well-formed.
_BodyHeaders
  +_RequestHeaders
  X-Include-Cost?: "true" | "false"
    # Whether the response includes its cost. Default: the account's setting.
  X-Zero-Retention?: "true" | "false"
    # Whether nothing of the request is kept after its end, but its usage record. Default: the
    # account's setting, which only `true` can change.
_CreationHeaders
  +_BodyHeaders
  Idempotency-Key?: match("^[!-~]{1,255}$")
    # Later requests with the same key and body get the same response and do not run again.
  X-Event-Ids?: "true" | "false"
    # Whether the events of a stream have an `id`. Default: only with `background` or an
    # Idempotency-Key. Events of a resumed stream always have one.
_Position
  stream?: flag  # Whether to stream the response.
  starting_after?: position  # With `stream`: number of the last received event.
_ModelName
  model?: str  # The model. Default: the account's default or only model.
"""
"""Objects with their members, whose types are written as in Python; members with `?` may be absent.

`+NAME` stands for the members of another object, and `NAME = TYPE` names a type, such as a short
object. Descriptions follow `# `. Objects whose name begins with `_` are no schemas of the page, but
parts of others, or parameters.
"""


_TYPES: Final[dict[str, Schema]] = {
    "time": {"type": "string", "format": "date-time"},
    "dialect": {"type": "string", "enum": [each.value for each in Dialect]},
    "scope": {"type": "string", "enum": [each.value for each in LimitScope]},
    "tier": {"type": "string", "enum": [each.value for each in ServiceTier]},
    "hidden": {
        "type": ["integer", "null"],
        "description": "Null for a budget or credit whose use the credential may not see.",
    },
    "stop": {
        "enum": [
            "end_turn",
            "max_tokens",
            "model_context_window_exceeded",
            "stop_sequence",
            "tool_use",
        ]
    },
    "flag": {"type": "boolean", "default": False},
    "position": {"type": "integer", "minimum": 0, "default": 0},
    "files": schema_of(f"list[InfillFile, :{MAX_FILES}]"),
}


@cache
def table_schemas() -> dict[str, Schema]:
    """Return the schemas of the table by name; those whose name begins with `_` are only parts."""
    found: dict[str, Schema] = {}
    schema: Schema = {}
    for line in re.sub(r"\n +# ", " # ", _TABLE.strip()).splitlines():
        code, *texts = (part.strip() for part in line.split("# "))
        description = {"description": " ".join(texts)} if texts else {}
        if not line.startswith(" "):
            name, _, kind = code.partition(" = ")
            schema = {"type": "object", "required": [], "properties": {}}
            schema = found[name] = (schema_of(kind, **_TYPES) if kind else schema) | description
            continue
        for member in code.split("; "):
            name, _, kind = member.partition(": ")
            if kind:
                part = {name.rstrip("?"): schema_of(kind, **_TYPES) | description}
                required = [name] * (not name.endswith("?"))
            else:
                base = found[name.removeprefix("+")]
                part, required = base["properties"], base["required"]
            schema["properties"] |= part
            schema["required"] += required
    return found


HEADER_TEXT: Final = {
    "x-request-id": "Id of the request: the client's if it is well-formed, else a new one.",
    "x-max-tokens-applied": "Effective `max_tokens`: the lowest of all prompts.",
    "x-prompt-truncated": "Number of truncated prompt tokens, if any.",
    "x-ignored-params": "Parameters of the body and the query that have no effect, if any.",
    "openai-processing-ms": "Milliseconds from the request to the first byte of the response.",
}

LIMIT_TEXT: Final = {
    "x-ratelimit-limit-requests": "Limit of requests: the tightest of key, project and tenant.",
    "x-ratelimit-remaining-requests": "Remaining requests.",
    "x-ratelimit-reset-requests": "Time until the limit is fully available, such as `6m0s`.",
    "x-ratelimit-limit-tokens": "Limit of tokens.",
    "x-ratelimit-remaining-tokens": "Remaining tokens.",
    "x-ratelimit-reset-tokens": "Time until the limit is fully available.",
    "x-ratelimit-limit-tokens-prompt": "Limit of prompt tokens.",
    "x-ratelimit-remaining-tokens-prompt": "Remaining prompt tokens.",
    "x-ratelimit-limit-tokens-generated": "Limit of completion tokens.",
    "x-ratelimit-remaining-tokens-generated": "Remaining completion tokens.",
    **{
        f"anthropic-ratelimit-{family}-{part}": f"{text} {tokens}, in Anthropic's API."
        for family, tokens in (
            ("requests", "requests"),
            ("tokens", "tokens"),
            ("input-tokens", "prompt tokens"),
            ("output-tokens", "completion tokens"),
        )
        for part, text in (
            ("limit", "Limit of"),
            ("remaining", "Remaining"),
            ("reset", "Time at which the limit is fully available, for"),
        )
    },
    "x-budget-remaining": "Remaining dollars of budgets and credits.",
}
"""Headers of rate-limited responses."""

ID_TEXT: Final = {"x-request-id": HEADER_TEXT["x-request-id"]}

_RETRY_TEXT = ID_TEXT | {
    "link": 'The page of the error\'s code, with `rel="help"`.',
    "x-should-retry": "`true` if a retry of the same request may succeed, else `false`.",
    "retry-after": "Seconds after which to retry, if a retry may succeed.",
    "retry-after-ms": "The same in milliseconds.",
}

_REFUSED_TEXT: Final = _RETRY_TEXT | {
    "x-ratelimit-limit-audio-seconds": "Limit of seconds of audio a day, if it is exceeded.",
    "x-ratelimit-remaining-audio-seconds": "Remaining seconds of audio.",
    "x-ratelimit-reset-audio-seconds": "Time until the day ends.",
}

OTHER_TEXT: Final = {
    "request-id": "The id of the request in Anthropic's API.",
    "x-cost": "Cost in dollars, if the account or the request enables it; not in streams.",
    "sunset": "When requests for this alias begin to fail (RFC 8594), if the alias has a date.",
    "deprecation": "When the alias got this date (RFC 9745).",
    "idempotent-replayed": "`true` for the response of an earlier request with the same "
    "Idempotency-Key.",
}

RESPONSE_HEADERS: Final = tuple(HEADER_TEXT | LIMIT_TEXT | OTHER_TEXT | _REFUSED_TEXT)
"""Names of all described headers."""


def header_objects(texts: Mapping[str, str]) -> dict[str, Any]:
    """Return the OpenAPI description of response headers."""
    return {
        name: {"description": text, "schema": {"type": "string"}} for name, text in texts.items()
    }


ERROR_TEXT: Final = {
    "400": "A parameter is invalid; `param` names it.",
    "401": "No valid API key or token.",
    "402": "A budget or the credit balance is insufficient; 429 in dialect `openai`.",
    "403": "The credential does not permit the request, or not from this address.",
    "404": "The resource does not exist, has expired, or the credential has no access to it.",
    "408": "The body did not arrive in time.",
    "409": "The request conflicts with a resource, or with another of the same Idempotency-Key.",
    "413": "The body is too large.",
    "415": "The body is neither JSON in UTF-8 nor an upload's form, or its encoding is unknown.",
    "422": "The same as 400, in dialect `mistralrs`.",
    "429": "A limit is exceeded, or too many requests of the account are waiting.",
    "503": "The request cannot be served at the moment; retry after `retry-after` seconds.",
    "504": "The request exceeded its time limit.",
}
"""Meanings of the statuses of errors."""


def error_responses(statuses: Iterable[str]) -> dict[str, Any]:
    """Return the OpenAPI description of errors by status."""
    return {
        status: {
            "description": ERROR_TEXT[status],
            "headers": header_objects(_REFUSED_TEXT if status == "429" else _RETRY_TEXT),
            "content": {"application/json": {"schema": reference("Error")}},
        }
        for status in sorted(statuses)
    }
