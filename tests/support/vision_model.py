"""A tiny vision model with random weights, made during the run: its output means nothing.

An Idefics3, because it needs no torchvision: the demo model's tokenizer, two layers for text, two
for images of 56 x 56 pixels, four tokens for each image. The demo model's chat template comes with
the tokenizer. It takes content as a list of parts and writes the image token for each image.
"""

import sys
from pathlib import Path

IMAGE_TOKEN = "<image>"
TOKENS_OF_IMAGE = 4
"""Tokens of an image in the model's context, without the three around them."""

_SIDE_PIXELS = 56
_ALIGNMENT = 64


def make(tokenizer_folder: Path, folder: Path) -> None:
    """Write the model into `folder`; it is the same every time."""
    import torch
    from transformers import (
        AutoTokenizer,
        Idefics3Config,
        Idefics3ForConditionalGeneration,
        Idefics3Processor,
        LlamaConfig,
    )
    from transformers.models.idefics3.configuration_idefics3 import Idefics3VisionConfig
    from transformers.models.idefics3.image_processing_pil_idefics3 import (
        Idefics3ImageProcessorPil,
    )

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    tiles = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    marks = ["<fake_token_around_image>", "<end_of_utterance>", "<global-img>", *tiles]
    tokenizer.add_special_tokens({"additional_special_tokens": [IMAGE_TOKEN, *marks]})
    config = Idefics3Config(
        vision_config=Idefics3VisionConfig(
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            image_size=_SIDE_PIXELS,
            patch_size=14,
        ),
        text_config=LlamaConfig(
            vocab_size=-(-len(tokenizer) // _ALIGNMENT) * _ALIGNMENT,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=2048,
            bos_token_id=0,
            eos_token_id=1,
            pad_token_id=0,
        ),
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE_TOKEN),
        scale_factor=2,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = Idefics3ForConditionalGeneration(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    edge = {"longest_edge": _SIDE_PIXELS}
    pixels = Idefics3ImageProcessorPil(size=edge, max_image_size=edge, do_image_splitting=False)
    processor = Idefics3Processor(
        image_processor=pixels, tokenizer=tokenizer, image_seq_len=TOKENS_OF_IMAGE
    )
    processor.save_pretrained(folder)


if __name__ == "__main__":
    make(Path(sys.argv[1]), Path(sys.argv[2]))
