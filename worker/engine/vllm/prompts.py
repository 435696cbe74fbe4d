"""Prompt inputs for vLLM: token ids, and the images that some of them represent."""

import logging
from collections.abc import Callable, Sequence
from io import BytesIO
from typing import TYPE_CHECKING, Any

from contract.messages import AUDIO_RATE, ContextExcess
from worker.engine.base import EngineRequest, InvalidRequestError

_log = logging.getLogger(__name__)

FORMATS = ("JPEG", "PNG", "WEBP", "GIF")
MAX_PIXELS = 16_000_000
"""Maximum width times height, checked before decoding."""
MAX_PIXELS_TOGETHER = (64_000_000, 160_000_000)
"""Maximum pixels of all images of a request, with a short and with a long context window; each
takes three bytes while decoding."""
_PIXELS_OF_TOKEN = 1024
"""Pixels that a vision model of full resolution reads as one token."""
MAX_SIDE = 16_384
"""Maximum width and height: a thin line of few pixels may be as harmful as a large image."""
_TOO_LARGE = f"must have at most {MAX_PIXELS} pixels and {MAX_SIDE} on a side."


_FULL_SCALE = 32_768.0
"""The sample of a signed integer that is 1.0 as a float."""


class Prompts:
    """Creates vLLM's engine inputs."""

    def __init__(
        self, llm: Any, tokens_input: Callable[..., Any], parse: Callable[[Any], Any]
    ) -> None:
        """Read which inputs the model accepts.

        Args:
            llm: An `AsyncLLM`.
            tokens_input: vLLM's constructor of inputs without images.
            parse: vLLM's parser of prompts, for this model.
        """
        config = llm.vllm_config.model_config
        self._window = config.max_model_len
        self._renderer = llm.renderer
        self._tokens_input = tokens_input
        self._parse = parse
        self._image_token_id = _image_token_id(config)
        self.max_images = 0
        """Maximum number of images in one prompt."""
        self.image_token = ""
        """Text of the token that represents an image; empty if the model has no vision."""
        if self._image_token_id is not None:
            self.max_images = int(config.multimodal_config.get_limit_per_prompt("image"))
            self.image_token = str(llm.tokenizer.convert_ids_to_tokens(self._image_token_id))

    def image_tokens(self) -> int:
        """Return the maximum tokens of an image in vLLM's prompts; 0 if unknown."""
        if not self.max_images:
            return 0
        processor, counts = self._renderer.mm_processor, {"image": 1}
        try:
            most = processor.info.get_mm_max_tokens_per_item(self._window, counts)
            if most is not None:
                return int(most["image"])
            # The largest image that the model accepts, with the tokens around it.
            made = processor.get_dummy_mm_inputs(counts)
            return sum(int(each.length) for each in made["mm_placeholders"]["image"])
        except Exception as error:  # A model's own processor may raise any error.
            _log.info("Could not determine how many tokens an image takes", exc_info=error)
            return 0

    def make(self, request: EngineRequest) -> Any:
        """Return the engine input of a request. Slow with images: call it in a thread.

        Raises InvalidRequestError.
        """
        self._check_marks(request)
        salt = request.cache_salt or None
        if request.audio:
            return self._with_audio(request)
        if not request.images:
            return self._tokens_input(request.prompt_token_ids, cache_salt=salt)
        prompt: dict[str, Any] = {
            "prompt_token_ids": request.prompt_token_ids,
            "multi_modal_data": {
                "image": read_images(
                    request.images, request.image_params, most_pixels=most_pixels(self._window)
                )
            },
        }
        if salt is not None:
            prompt["cache_salt"] = salt
        return self._rendered(prompt, "images")

    def _with_audio(self, request: EngineRequest) -> Any:
        import numpy as np

        samples = np.frombuffer(request.audio, "<i2").astype(np.float32) / _FULL_SCALE
        media = {"audio": (samples, AUDIO_RATE)}
        prompt = {
            "encoder_prompt": {"prompt": "", "multi_modal_data": media},
            "decoder_prompt": {"prompt_token_ids": request.prompt_token_ids},
        }
        return self._rendered(prompt, "audio")

    def _rendered(self, prompt: dict[str, Any], media: str) -> Any:
        try:
            (made,) = self._renderer.render_cmpl([self._parse(prompt)])
        except Exception as error:  # A model's own processor may raise any error.
            _log.info("Rejected %s", media, exc_info=error)
            raise InvalidRequestError(f"{media}: the model cannot take the {media}.") from None
        return made

    def _check_marks(self, request: EngineRequest) -> None:
        given = len(request.images)
        if given > self.max_images:
            raise InvalidRequestError(
                f"images must be at most {self.max_images} for this model. Given: {given}"
            )
        if self._image_token_id is None:
            return
        marks = request.prompt_token_ids.count(self._image_token_id)
        if marks != given:
            raise InvalidRequestError(
                f"images must be as many as the prompt has {self.image_token} tokens ({marks}). "
                f"Given: {given}"
            )


def decoder_tokens(prompt: Any) -> int:
    """Return the tokens of an engine input, of a model with an encoder those of its decoder."""
    return len(prompt.get("decoder_prompt", prompt)["prompt_token_ids"])


def clip_seconds(config: Any, model: Any) -> int:
    """Return how many seconds of audio a model transcribes at once.

    Args:
        config: vLLM's `ModelConfig`.
        model: The model's class in vLLM.

    Raises ValueError for a model that is not one of speech in Whisper's form.
    """
    if not (config.is_encoder_decoder and getattr(model, "supports_segment_timestamp", False)):
        raise ValueError("runner: of models of speech, only those in Whisper's form are served")
    speech = model.get_speech_to_text_config(config, "transcribe")
    if speech.sample_rate != AUDIO_RATE or not speech.max_audio_clip_s:
        raise ValueError(f"runner: the model must take clips with {AUDIO_RATE} samples a second")
    return int(speech.max_audio_clip_s)


def fitting_max_tokens(request: EngineRequest, prompt_tokens: int, window: int) -> int:
    """Return max_tokens, lowered if images leave less room. Raises InvalidRequestError."""
    room = window - prompt_tokens
    if not request.images or request.max_tokens <= room:
        return request.max_tokens
    excess = ContextExcess(prompt_tokens, request.max_tokens, window)
    if room < 1:
        raise InvalidRequestError(
            f"With its images the prompt has {prompt_tokens} tokens, which must be less than the "
            f"context window of {window} tokens.",
            excess=excess,
        )
    if not request.may_shorten:
        raise InvalidRequestError(
            f"With its images the prompt has {prompt_tokens} tokens; together with max_tokens it "
            f"must be at most {window} tokens. Given: {prompt_tokens} + {request.max_tokens}",
            excess=excess,
        )
    return room


def _image_token_id(config: Any) -> int | None:
    if not config.is_multimodal_model:
        return None
    names = ("image_token_id", "image_token_index")
    found = (getattr(config.hf_config, name, None) for name in names)
    return next((int(token_id) for token_id in found if token_id is not None), None)


if TYPE_CHECKING:
    from PIL.Image import Image


def most_pixels(window: int) -> int:
    """Return the maximum pixels of all images of a request for a context window."""
    least, most = MAX_PIXELS_TOGETHER
    return min(max(window * _PIXELS_OF_TOKEN, least), most)


def read_images(
    files: Sequence[bytes], params: Sequence[str], *, most_pixels: int
) -> list["Image"]:
    """Decode image files to RGB, of animations the first frame.

    Raises InvalidRequestError, which names the first invalid one by its entry in `params`.
    """
    images: list[Image] = []
    room = most_pixels
    for content, param in zip(files, params, strict=True):
        images.append(_read(content, param, room, most_pixels))
        room -= images[-1].width * images[-1].height
    return images


def _read(content: bytes, param: str, room: int, most_pixels: int) -> "Image":
    from PIL import Image

    try:
        with Image.open(BytesIO(content), formats=FORMATS) as image:
            _check_size(image.width, image.height, param)
            if image.width * image.height > room:
                raise _refusal(
                    param,
                    f"is one too many: all images together must have at most {most_pixels} pixels.",
                )
            return image.convert("RGB")
    except InvalidRequestError:
        raise
    except Image.DecompressionBombError:
        raise _refusal(param, _TOO_LARGE) from None
    except Exception:  # A hostile file may cause any error in a decoder.
        raise _refusal(
            param, f"is damaged or not an image in one of these formats: {', '.join(FORMATS)}."
        ) from None


def _check_size(width: int, height: int, param: str) -> None:
    if width * height > MAX_PIXELS or max(width, height) > MAX_SIDE:
        raise _refusal(param, f"{_TOO_LARGE} Given: {width} x {height}.")


def _refusal(param: str, wrong: str) -> InvalidRequestError:
    return InvalidRequestError(f"'{param}' {wrong}", param=param)
