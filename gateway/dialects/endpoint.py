"""Endpoints that run models, with their differences except for the shapes of responses."""

import hashlib
import os
import re
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

from contract.messages import PoolingTask, WorkerCard
from gateway.dialects.chat.request import ChatCompletionRequest, to_chat_generation_request
from gateway.dialects.completions import read_completion
from gateway.dialects.embeddings import (
    read_classification,
    read_cohere_rerank,
    read_embedding,
    read_rerank,
    read_score,
)
from gateway.dialects.messages.request import read_counted_message, read_message
from gateway.dialects.native import read_native_completion, read_native_infill
from gateway.dialects.profile import Profile
from gateway.dialects.request import GenerationRequest, ResponseForm
from gateway.dialects.responses.request import read_response
from gateway.dialects.speech import read_transcription, read_translation
from gateway.dialects.wire import validate
from gateway.records.errors import ErrorStyle

_ID_LENGTH: Final = 26
"""Each character has 5 random bits."""
_ID_CHARACTERS: Final = f"[a-z2-7]{{{_ID_LENGTH}}}"
_CHARACTER_OF_BYTE: Final = b"abcdefghijklmnopqrstuvwxyz234567" * 8


class BodyParser(Protocol):
    """Parses a body into a request."""

    def __call__(
        self, body: dict[str, Any], profile: Profile, *, max_prompts: int
    ) -> GenerationRequest:
        """Return the request with all defaults applied. Raises a BadRequestError."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An endpoint that runs a model."""

    name: str
    """Name in usage records and metrics."""
    path: str
    id_prefix: str
    """Prefix of the ids of its responses, equal only in endpoints that share their responses."""
    response_object: str
    """`object` of its responses."""
    read: BodyParser
    form: ResponseForm = ResponseForm.OPENAI
    error_style: ErrorStyle | None = None
    """The style of its errors; None: that of the request's dialect."""
    has_native_path: bool = False
    """Whether it exists only in dialects that have llama.cpp's own paths."""
    takes_file: bool = False
    """Whether its bodies are forms with a file."""
    takes_models: bool = False
    """Whether a body may name fallbacks of its model."""
    takes_chats: bool = False
    """Whether a body with `messages` is a chat."""

    def of(self, body: dict[str, Any]) -> "Endpoint":
        """Return the endpoint that serves a body."""
        return CHATS if self.takes_chats and "messages" in body else self

    def error_style_in(self, profile: Profile) -> ErrorStyle:
        """Return the style of its errors in a dialect."""
        return self.error_style or profile.error_style

    @property
    def id_pattern(self) -> str:
        """The regular expression of its response ids."""
        return f"{self.id_prefix}{_ID_CHARACTERS}"

    def new_id(self) -> str:
        """Return an unguessable id."""
        return self._id(os.urandom(_ID_LENGTH))

    def id_of(self, name: str) -> str:
        """Return the id that always belongs to a name, which nobody may be able to guess."""
        return self._id(hashlib.sha256(name.encode()).digest())

    def _id(self, bits: bytes) -> str:
        return self.id_prefix + bits[:_ID_LENGTH].translate(_CHARACTER_OF_BYTE).decode()

    def has_given(self, request_id: str) -> bool:
        """Return whether an id has the form of this endpoint's response ids."""
        return re.fullmatch(self.id_pattern, request_id) is not None


def _read_chat(body: dict[str, Any], profile: Profile, *, max_prompts: int) -> GenerationRequest:
    wire = validate(ChatCompletionRequest, body)
    return to_chat_generation_request(wire, profile, max_prompts=max_prompts)


COMPLETIONS: Final = Endpoint(
    "completions",
    "/v1/completions",
    "cmpl-",
    "text_completion",
    read_completion,
    takes_models=True,
)
CHATS: Final = Endpoint(
    "chat.completions",
    "/v1/chat/completions",
    "chatcmpl-",
    "chat.completion",
    _read_chat,
    takes_models=True,
)

MESSAGES: Final = Endpoint(
    name="messages",
    path="/v1/messages",
    id_prefix="msg_",
    response_object="message",
    read=read_message,
    form=ResponseForm.MESSAGES,
    error_style=ErrorStyle.ANTHROPIC,
    takes_models=True,
)

COUNTED_MESSAGES: Final = replace(
    MESSAGES, path=f"{MESSAGES.path}/count_tokens", read=read_counted_message
)
"""The endpoint that counts the tokens of a message's prompt."""

ANTHROPIC_PREFIX: Final = "/anthropic"
"""Before the paths of MESSAGES in the addresses that other servers have for them."""

RESPONSES: Final = Endpoint(
    name="responses",
    path="/v1/responses",
    id_prefix="resp_",
    response_object="response",
    read=read_response,
    form=ResponseForm.RESPONSES,
    error_style=ErrorStyle.OPENAI,
    takes_models=True,
)

ENDPOINTS: Final = (COMPLETIONS, CHATS, MESSAGES, RESPONSES)
"""The endpoints of the generation API; their responses can be read again."""

INVOCATIONS: Final = replace(COMPLETIONS, path="/invocations", takes_chats=True)
"""The path that Amazon SageMaker calls; its responses are read again at the paths of ENDPOINTS."""

PREFIXED_MESSAGES: Final = replace(MESSAGES, path=f"{ANTHROPIC_PREFIX}{MESSAGES.path}")
"""MESSAGES at another path; its responses are read again at the paths of ENDPOINTS."""

NATIVE_ENDPOINTS: Final = (
    *(
        replace(COMPLETIONS, path=path, read=read_native_completion, has_native_path=True)
        for path in ("/completion", "/completions")
    ),
    replace(COMPLETIONS, path="/infill", read=read_native_infill, has_native_path=True),
    replace(CHATS, path="/chat/completions", has_native_path=True),
    replace(RESPONSES, path="/responses", has_native_path=True),
)
"""llama.cpp's own paths. Their responses are read again at the paths of ENDPOINTS."""

EMBEDDINGS: Final = Endpoint("embeddings", "/v1/embeddings", "embd-", "list", read_embedding)
RERANK: Final = Endpoint("rerank", "/v1/rerank", "rerank-", "list", read_rerank)
SCORE: Final = Endpoint("score", "/v1/score", "score-", "list", read_score)
CLASSIFY: Final = Endpoint("classify", "/v1/classify", "classify-", "list", read_classification)
POOLING_ENDPOINTS: Final = (
    EMBEDDINGS,
    RERANK,
    replace(RERANK, path="/v2/rerank", read=read_cohere_rerank),
    replace(RERANK, path="/rerank"),
    SCORE,
    replace(SCORE, path="/score"),
    CLASSIFY,
    replace(CLASSIFY, path="/classify"),
)
"""The endpoints of pooling models, each at all of its paths."""

BATCH_ENDPOINTS: Final = {each.name: each for each in (*ENDPOINTS, EMBEDDINGS)}
"""The endpoints whose requests can be lines of batches, by name."""

TRANSCRIPTIONS: Final = Endpoint(
    name="audio.transcriptions",
    path="/v1/audio/transcriptions",
    id_prefix="transcr-",
    response_object="transcription",
    read=read_transcription,
    form=ResponseForm.SPEECH,
    error_style=ErrorStyle.OPENAI,
    takes_file=True,
)
TRANSLATIONS: Final = replace(
    TRANSCRIPTIONS,
    name="audio.translations",
    path="/v1/audio/translations",
    id_prefix="transl-",
    read=read_translation,
)
SPEECH_ENDPOINTS: Final = (TRANSCRIPTIONS, TRANSLATIONS)
"""The endpoints of models of speech."""


def served_endpoints(card: WorkerCard) -> dict[str, str]:
    """Return the names and paths of the endpoints that serve a model."""
    support = card.pooling
    if card.clip_seconds:
        served = [*SPEECH_ENDPOINTS]
    elif support is None:
        served = [each for each in ENDPOINTS if each is COMPLETIONS or card.chat is not None]
    elif support.task is PoolingTask.EMBED:
        served = [EMBEDDINGS, RERANK, SCORE]
    else:
        served = [CLASSIFY, *[RERANK, SCORE] * (support.pairs is not None)]
    return {each.name: each.path for each in served}
