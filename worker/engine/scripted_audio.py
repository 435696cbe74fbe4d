"""Transcripts of the scripted engine: a word for each second, in segments of ten seconds."""

import math
from typing import Final

from tokenizers import Tokenizer

from common.not_none import not_none
from contract.messages import AUDIO_RATE, SAMPLE_BYTES
from worker.engine.base import EngineRequest
from worker.engine.scripted_chats import ANY_WORD

CLIP_SECONDS: Final = 30
_SEGMENT_SECONDS: Final = 10
_LANGUAGE: Final = "<|en|>"


def transcript(tokenizer: Tokenizer, request: EngineRequest, eos_token_id: int) -> list[int]:
    """Return the tokens of a completion, in the form that Whisper's tokens in the prompt ask for.

    A prompt without a language gets one. With a grammar, the prompt's tokens may be in the grammar.
    """
    prompt, grammar = request.prompt_token_ids, request.grammar

    def id_of(text: str) -> int:
        return not_none(tokenizer.token_to_id(text))

    def is_asked(text: str) -> bool:
        return id_of(text) in prompt or f"<[{id_of(text)}]>" in grammar

    def time(seconds: float) -> int:
        return id_of(f"<|{round(seconds / 0.02) * 0.02:.2f}|>")

    plan: list[int] = []
    is_plain = is_asked("<|notimestamps|>")
    if prompt[-1] == id_of("<|startoftranscript|>"):
        task = "<|translate|>" if is_asked("<|translate|>") else "<|transcribe|>"
        plan = [id_of(_LANGUAGE), id_of(task), *[id_of("<|notimestamps|>")] * is_plain]
    seconds = len(request.audio) / (AUDIO_RATE * SAMPLE_BYTES)
    for start in range(0, math.ceil(seconds), _SEGMENT_SECONDS):
        end = min(start + _SEGMENT_SECONDS, seconds)
        words = [ANY_WORD] * math.ceil(end - start)
        plan += words if is_plain else [time(start), *words, time(end)]
    return [*plan, eos_token_id]
