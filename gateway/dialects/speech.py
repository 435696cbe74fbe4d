"""Transcriptions and translations of audio: the forms of `/v1/audio`."""

import re
from enum import StrEnum
from functools import partial
from typing import Annotated, Any, Final

from pydantic import Field

from contract.sampling import Range, SamplingSpec
from gateway.dialects.bodies import read_model
from gateway.dialects.fields import Parameters, bounded
from gateway.dialects.parameters import unread
from gateway.dialects.profile import ALL_THAT_FIT, ContextLengthBehavior, Profile
from gateway.dialects.request import (
    LANGUAGE,
    GenerationRequest,
    ResponseForm,
    SpeechFormat,
    SpeechOptions,
)
from gateway.dialects.sampling.parameters import new_seed
from gateway.dialects.stream_options import AccountParameters, read_service_tier
from gateway.dialects.wire import validate
from gateway.records.errors import MissingParameterError, invalid, must, unsupported

_WRITTEN: Final = Field(strict=False)
"""The fields of forms are texts."""
REFUSED: Final = {
    "include": "is not supported: log-probabilities of transcriptions are not returned.",
    "chunking_strategy": "must be auto, or absent: audio is always cut at quiet points.",
    "keywords": "is not supported. Write the words into 'prompt'.",
    "languages": "is not supported. Use 'language', or omit it: the model detects the language.",
    "known_speaker_names": "is not supported: speakers are not told apart.",
    "known_speaker_references": "is not supported: speakers are not told apart.",
}
"""Fields that are rejected, and why."""


class Granularity(StrEnum):
    """The parts of a transcription that can have times."""

    SEGMENT = "segment"


class SpeechParameters(AccountParameters, Parameters):
    """Fields of the forms of `/v1/audio`. Of other fields, a header of the response names those
    without effect.
    """

    file: bytes | None = None
    """The audio: flac, m4a, mp3, mp4, mpeg, mpga, ogg, wav or webm. Required."""
    model: str | None = None
    """The model, from `GET /v1/models`. Required in dialects openai, fireworks and omlx."""
    prompt: str | None = None
    """Text before the audio, which guides the style; the model reads its last tokens, as many as
    half of its context window."""
    response_format: Annotated[SpeechFormat, _WRITTEN] | None = None
    """Default: json."""
    temperature: Annotated[float, bounded(Range(0, 1)), _WRITTEN] | None = None
    """Default: 0."""


class TranscriptionRequest(SpeechParameters):
    """Form of `POST /v1/audio/transcriptions`."""

    language: str | None = None
    """Language of the audio (ISO 639-1). Default: the model detects it."""
    stream: Annotated[bool, _WRITTEN] | None = None
    """Whether to send the text as server-sent events while it is written, in formats json and text.
    Default: false."""
    timestamp_granularities: Annotated[
        list[Annotated[Granularity, _WRITTEN]] | None, Field(alias="timestamp_granularities[]")
    ] = None
    """`segment`, in format verbose_json. Times of words are not supported. Default: segment."""
    chunking_strategy: str | None = None
    """`auto`: audio is cut at quiet points into clips that the model can read. Default: auto."""


class TranslationRequest(SpeechParameters):
    """Form of `POST /v1/audio/translations`."""


def _read(
    body: dict[str, Any],
    profile: Profile,
    *,
    max_prompts: int,
    is_translated: bool,
) -> GenerationRequest:
    """Return the request of a form. Raises a BadRequestError."""
    del max_prompts
    for name, value in body.items():
        refusal = REFUSED.get(re.split(r"\[", name, maxsplit=1)[0])
        if refusal is not None and (name, value) != ("chunking_strategy", "auto"):
            raise unsupported(name, refusal)
    if "word" in body.get("timestamp_granularities[]", ()):
        raise unsupported(
            "timestamp_granularities[]", "must be segment: models give no times of words."
        )
    wire = validate(TranslationRequest if is_translated else TranscriptionRequest, body)
    form = wire.response_format or SpeechFormat.JSON
    language, stream, granularities = None, False, None
    if isinstance(wire, TranscriptionRequest):
        language, stream = wire.language, wire.stream is True
        granularities = wire.timestamp_granularities
    if wire.file is None:
        raise MissingParameterError("file")
    if language is not None and not LANGUAGE.fullmatch(language):
        raise must("language", "be a code of ISO 639-1, such as en", language)
    if stream and form not in (SpeechFormat.JSON, SpeechFormat.TEXT):
        raise must("response_format", "be json or text with 'stream'", form)
    if granularities and form is not SpeechFormat.VERBOSE_JSON:
        raise invalid("timestamp_granularities[]", "needs 'response_format' verbose_json.")
    return GenerationRequest(
        profile=profile,
        model=read_model(wire.model, profile),
        prompts=[wire.prompt or ""],
        form=ResponseForm.SPEECH,
        form_options=SpeechOptions(form, is_translated=is_translated, language=language or ""),
        audio=[wire.file],
        images=[[]],
        image_params=[[]],
        max_tokens=ALL_THAT_FIT,
        context_length_behavior=ContextLengthBehavior.ERROR,
        sampling=SamplingSpec(seed=new_seed(), temperature=wire.temperature or 0.0),
        stream=stream,
        # Segments show the mean of their tokens.
        logprobs=0 if form is SpeechFormat.VERBOSE_JSON else None,
        shows_special_tokens=True,
        reads_prefix_cache=False,
        service_tier=read_service_tier(wire),
        ignored_parameters=tuple(sorted(unread(wire.model_extra))),
    )


read_transcription = partial(_read, is_translated=False)
read_translation = partial(_read, is_translated=True)
