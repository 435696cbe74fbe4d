"""A tiny model of speech in Whisper's form, made during the run: `python -m ... FOLDER`.

It has the demo model's words and Whisper's special tokens. `write` writes what the scripted engine
needs. `make` adds random weights for vLLM, so its output means nothing.
"""

import io
import json
import math
import struct
import sys
import wave
from pathlib import Path
from typing import Final

from tokenizers import AddedToken, Tokenizer

from contract.messages import AUDIO_RATE
from tests.support.stack import CHECKPOINT

WINDOW: Final = 448
LANGUAGES: Final = ("en", "de", "ja")
MARKS: Final = (
    "<|endoftext|>",
    "<|startoftranscript|>",
    *(f"<|{language}|>" for language in LANGUAGES),
    *("<|translate|>", "<|transcribe|>", "<|startofprev|>", "<|notimestamps|>"),
)
_TONE: Final = 400
"""Hertz; divides every rate."""
TIMES: Final = tuple(f"<|{step * 0.02:.2f}|>" for step in range(1501))


def write(folder: Path) -> Tokenizer:
    """Write the model's tokenizer and its configuration without weights."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    tokenizer.add_special_tokens([*MARKS])
    tokenizer.add_tokens([AddedToken(each, normalized=False) for each in TIMES])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"vocab_size": tokenizer.get_vocab_size(), "max_target_positions": WINDOW}
    (folder / "config.json").write_text(json.dumps(config))
    tokens = {"eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>"}
    named = {"tokenizer_class": "PreTrainedTokenizerFast", **tokens, "pad_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    return tokenizer


def make(folder: Path) -> None:
    """Write the model with weights, the same every time."""
    import torch
    from transformers import (
        WhisperConfig,
        WhisperFeatureExtractor,
        WhisperForConditionalGeneration,
    )

    tokenizer = write(folder)
    end = tokenizer.token_to_id("<|endoftext|>")
    torch.manual_seed(0)
    config = WhisperConfig(
        vocab_size=tokenizer.get_vocab_size(),
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        d_model=64,
        init_std=0.5,
        max_target_positions=WINDOW,
        pad_token_id=end,
        bos_token_id=end,
        eos_token_id=end,
        decoder_start_token_id=tokenizer.token_to_id("<|startoftranscript|>"),
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    WhisperForConditionalGeneration(config).save_pretrained(folder)
    WhisperFeatureExtractor().save_pretrained(folder)


def sound(seconds: float, *, rate: int = AUDIO_RATE, quiet: tuple[float, ...] = ()) -> bytes:
    """Return a WAV file: a tone that is silent for 0.2 seconds from each of these times on."""
    period = rate // _TONE
    levels = (round(8000 * math.sin(number * math.tau / period)) for number in range(period))
    tone = struct.pack(f"<{period}h", *levels)
    samples = bytearray(tone * math.ceil(seconds * _TONE))[: round(seconds * rate) * 2]
    for at in quiet:
        silence = bytes(round(0.2 * rate) * 2)
        start = round(at * rate) * 2
        samples[start : start + len(silence)] = silence
    content = io.BytesIO()
    with wave.open(content, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(samples)
    return content.getvalue()


if __name__ == "__main__":
    make(Path(sys.argv[1]))
