"""Train the demo model: tokenizer, weights and the other files of a Hugging Face model folder.

Run from the project root: ``python -m scripts.demo_model.train worker/demo_model/checkpoint``.
The same seed and steps give the same text and batches. The weights agree between machines only as
far as their floating-point arithmetic does.
"""

import argparse
import json
import math
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from scripts.demo_model.corpus import documents
from scripts.demo_model.corpus.chat import TEMPLATE_PATH

SPECIAL_TOKENS = [
    "<s>",
    "</s>",
    "<|user|>",
    "<|assistant|>",
    "<|system|>",
    "<image>",
    "<|fim_prefix|>",
    "<|fim_suffix|>",
    "<|fim_middle|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<|tool|>",
]
"""The first tokens of the vocabulary, in this order."""
VISIBLE_TOKENS = {"<think>", "</think>", "<tool_call>", "</tool_call>"}
"""Tokens that stay in the text when special tokens are skipped, for parsers to find them."""

BOS, EOS = 0, 1
VOCABULARY_SIZE = 2048
MAX_POSITIONS = 2048
TOKENS_PER_STEP = 6144
LEARNING_RATE = 4e-3
WARM_UP_STEPS = 60
VALIDATION_DOCUMENTS = 600


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """A byte-level BPE with single digits, whose merges never join bytes of CJK text or emoji.

    Characters from U+2000 on are hidden from the training, so that they take several tokens each.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex("[0-9]"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    plain = ("".join(letter for letter in text if ord(letter) < 0x2000) for text in texts)
    tokenizer.train_from_iterator(plain, trainer)
    state = json.loads(tokenizer.to_str())
    for entry in state["added_tokens"]:
        entry["special"] = entry["content"] not in VISIBLE_TOKENS
    return Tokenizer.from_str(json.dumps(state))


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=SPECIAL_TOKENS[BOS],
        eos_token=SPECIAL_TOKENS[EOS],
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = TEMPLATE_PATH.read_text(encoding="utf-8")
    fast.save_pretrained(folder)
    # The class above adds a post-processor; without one, no token is inserted before a prompt.
    tokenizer.save(str(folder / "tokenizer.json"))


class Text:
    """The documents as one row of token ids, ``<s>`` and ``</s>`` around each."""

    def __init__(self, tokenizer: Tokenizer, texts: list[str]) -> None:
        row: list[int] = []
        starts: list[int] = []
        for encoding in tokenizer.encode_batch(texts):
            starts.append(len(row))
            row += [BOS, *encoding.ids]
            if row[-1] != EOS:
                row.append(EOS)
        self.row = torch.tensor(row)
        self.starts = torch.tensor(starts)

    def windows(self, length: int, count: int, source: torch.Generator) -> torch.Tensor:
        """Windows of length + 1 ids, a row each.

        Half begin with the first word of a document, a quarter with the ``<s>`` before it and a
        quarter anywhere: prompts reach the model without ``<s>``.
        """
        last = len(self.row) - length - 2
        offsets = self.starts[torch.randint(0, len(self.starts), (count,), generator=source)]
        draw = torch.rand(count, generator=source)
        anywhere = torch.randint(0, last, (count,), generator=source)
        offsets = torch.where(draw < 0.25, anywhere, offsets + (draw < 0.75))
        return torch.stack([self.row[at : at + length + 1] for at in offsets.clamp(max=last)])


def build_model() -> LlamaForCausalLM:
    """A Llama with 2.9 million parameters and random weights."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY_SIZE,
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=32,
            max_position_embeddings=MAX_POSITIONS,
            tie_word_embeddings=True,
            bos_token_id=BOS,
            eos_token_id=EOS,
            rms_norm_eps=1e-5,
        )
    )


def loss_of(model: LlamaForCausalLM, rows: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy per token, in nats."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = model.model(input_ids=rows[:, :-1], use_cache=False).last_hidden_state
        logits = hidden @ model.lm_head.weight.T
    return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())


def window_length(step: int) -> int:
    """Return a short window for most steps and a long one for some, to train late positions."""
    if step % 40 == 39:
        return MAX_POSITIONS
    return 1024 if step % 8 == 7 else 256


def optimizers(model: LlamaForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for the embedding and the norms."""
    matrices = [
        weight
        for name, weight in model.named_parameters()
        if weight.ndim == 2 and "embed" not in name
    ]
    chosen = set(map(id, matrices))
    others = [weight for weight in model.parameters() if id(weight) not in chosen]
    return [
        torch.optim.Muon(
            matrices, lr=LEARNING_RATE, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(others, lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def schedule(step: int, steps: int) -> float:
    """The learning rate's factor: a linear rise, then a linear fall to nearly nothing."""
    rise = min(1.0, (step + 1) / WARM_UP_STEPS)
    return rise * max(0.02, min(1.0, (steps - step) / (0.7 * steps)))


def train(model: LlamaForCausalLM, text: Text, *, steps: int, seed: int) -> Iterator[float]:
    """Run this many training steps; yield the loss of each."""
    source = torch.Generator().manual_seed(seed)
    chosen = optimizers(model)
    for step in range(steps):
        length = window_length(step)
        rows = text.windows(length, TOKENS_PER_STEP // length, source)
        loss = loss_of(model, rows)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in chosen:
            optimizer.param_groups[0]["lr"] = LEARNING_RATE * schedule(step, steps)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        yield loss.item()


def validation_loss(model: LlamaForCausalLM, text: Text, seed: int) -> float:
    """Mean loss per token on documents that were not trained on, in nats."""
    source = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        losses = [float(loss_of(model, text.windows(256, 32, source))) for _ in range(8)]
    return sum(losses) / len(losses)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="folder to write the checkpoint to")
    parser.add_argument(
        "--steps", type=int, default=1600, help="training steps (default %(default)s)"
    )
    parser.add_argument(
        "--documents", type=int, default=100_000, help="documents to train on (default %(default)s)"
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="seed of text, weights and batches (default %(default)s)",
    )
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default %(default)s)")
    return parser.parse_args()


def main() -> None:
    """Generate the corpus, train tokenizer and model, write the folder, and print the results."""
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    started = time.monotonic()
    texts = list(documents(arguments.seed, arguments.documents))
    tokenizer = train_tokenizer(texts[:20_000])
    text = Text(tokenizer, texts)
    held_out = Text(tokenizer, list(documents(arguments.seed + 1, VALIDATION_DOCUMENTS)))
    print(f"{len(texts)} documents, {sum(map(len, texts))} characters, {len(text.row)} tokens, "
          f"{time.monotonic() - started:.0f} s", flush=True)  # fmt: skip
    model = build_model()
    print(f"{sum(weight.numel() for weight in model.parameters())} parameters", flush=True)
    recent = math.nan
    for step, loss in enumerate(
        train(model, text, steps=arguments.steps, seed=arguments.seed), start=1
    ):
        recent = loss if math.isnan(recent) else 0.95 * recent + 0.05 * loss
        if step % 50 == 0:
            print(f"step {step} loss {recent:.3f}, {time.monotonic() - started:.0f} s", flush=True)
    loss = validation_loss(model.eval(), held_out, arguments.seed)
    print(f"validation loss {loss:.3f} nats per token")
    model.generation_config = GenerationConfig(bos_token_id=BOS, eos_token_id=EOS)
    model.to(torch.bfloat16).save_pretrained(arguments.out)
    save_tokenizer(tokenizer, arguments.out)


if __name__ == "__main__":
    main()
