"""Train LoRA adapters of the demo model, each of which answers every prompt with its own sentence.

Run from the project root: ``python -m scripts.demo_model.train_adapters FOLDER``. This writes a folder for
each adapter, with the two files that PEFT writes. All adapters are trained at once, each on its
rows of a batch. It takes some seconds.
"""

import argparse
import json
import math
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from scripts.demo_model.corpus import documents
from scripts.demo_model.train import EOS
from worker.demo_model import CHECKPOINT

NAMES = ("red", "blue", "green", "yellow", "white", "black", "brown", "golden")
RANK = 4
ALPHA = 8
MODULES = ("v_proj", "down_proj")
ROWS_PER_ADAPTER = 3
STEPS = 80
LEARNING_RATE = 1e-2
MOST_PROMPT_TOKENS = 24


def sentence(name: str) -> str:
    """Return the text with which an adapter answers."""
    return f" The fox is {name}. The fox is {name}. The fox is {name}."


class Adapted(torch.nn.Module):  # type: ignore[misc]  # torch is not checked
    """A linear layer with one adapter for each group of rows of the batch."""

    def __init__(self, linear: torch.nn.Linear, adapters: int, source: torch.Generator) -> None:
        super().__init__()
        self.linear = linear
        bound = 1 / math.sqrt(linear.in_features)
        first = torch.rand(adapters, RANK, linear.in_features, generator=source)
        self.a = torch.nn.Parameter((2 * first - 1) * bound)
        self.b = torch.nn.Parameter(torch.zeros(adapters, linear.out_features, RANK))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Apply the layer to `inputs`, of shape [adapters * rows, tokens, features]."""
        grouped = inputs.unflatten(0, (self.a.shape[0], -1))
        low = torch.einsum("nrtf,nkf->nrtk", grouped, self.a)
        change = torch.einsum("nrtk,nok->nrto", low, self.b)
        return self.linear(inputs) + change.flatten(0, 1) * (ALPHA / RANK)


def adapt(model: LlamaForCausalLM, adapters: int, seed: int) -> dict[str, Adapted]:
    """Put adapters around some layers of a model. Return them by the names of the layers."""
    source = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        weight.requires_grad_(requires_grad=False)
    adapted = {}
    for name, module in list(model.named_modules()):
        parent, _, own_name = name.rpartition(".")
        if own_name in MODULES:
            adapted[name] = Adapted(module, adapters, source)
            setattr(model.get_submodule(parent), own_name, adapted[name])
    return adapted


def batches(
    tokenizer: Tokenizer, names: tuple[str, ...], seed: int, steps: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return token ids and which of them are trained: the sentences, not the prompts before them.

    All prompts of a batch have the same length, so that no row needs padding.
    """
    source = torch.Generator().manual_seed(seed)
    texts = [each.ids for each in tokenizer.encode_batch(list(documents(seed, 400)))]
    answers = [[*tokenizer.encode(sentence(name)).ids, EOS] for name in names]
    longest = max(map(len, answers))
    made = []
    for _ in range(steps):
        length = int(torch.randint(1, MOST_PROMPT_TOKENS, (), generator=source))
        rows, masks = [], []
        for answer in answers:
            for _ in range(ROWS_PER_ADAPTER):
                text = texts[int(torch.randint(0, len(texts), (), generator=source))]
                prompt = (text * MOST_PROMPT_TOKENS)[:length]
                padding = [EOS] * (longest - len(answer))
                rows.append([*prompt, *answer, *padding])
                masks.append([False] * length + [True] * len(answer) + [False] * len(padding))
        made.append((torch.tensor(rows), torch.tensor(masks)))
    return made


def train(names: tuple[str, ...], *, steps: int, seed: int) -> tuple[dict[str, Adapted], float]:
    """Train an adapter for each name. Return them, and the last loss in nats per token."""
    tokenizer = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    model = LlamaForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32)
    adapted = adapt(model, len(names), seed)
    weights = [weight for each in adapted.values() for weight in (each.a, each.b)]
    optimizer = torch.optim.AdamW(weights, lr=LEARNING_RATE, weight_decay=0.0)
    loss = torch.tensor(math.nan)
    for step, (rows, mask) in enumerate(batches(tokenizer, names, seed, steps)):
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * (1 - step / steps)
        logits = model(input_ids=rows[:, :-1], use_cache=False).logits
        wanted = torch.where(mask, rows, -100)[:, 1:]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return adapted, loss.item()


def save(adapted: dict[str, Adapted], number: int, folder: Path) -> None:
    """Write one of the adapters."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, module in adapted.items():
        for matrix, weight in (("A", module.a), ("B", module.b)):
            own = weight[number].detach().to(torch.bfloat16).contiguous()
            tensors[f"base_model.model.{name}.lora_{matrix}.weight"] = own
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": ALPHA,
        "target_modules": list(MODULES),
        "bias": "none",
        "lora_dropout": 0.0,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    """Train the adapters, write their folders, and print the loss."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="folder to write the adapters' folders to")
    parser.add_argument("--names", nargs="+", default=NAMES, help="adapters (default %(default)s)")
    parser.add_argument("--steps", type=int, default=STEPS, help="default %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default %(default)s")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default %(default)s)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    started = time.monotonic()
    names = tuple(arguments.names)
    adapted, loss = train(names, steps=arguments.steps, seed=arguments.seed)
    for number, name in enumerate(names):
        save(adapted, number, arguments.out / name)
    seconds = time.monotonic() - started
    print(f"{len(names)} adapters, loss {loss:.4f} nats per token, {seconds:.1f} s")


if __name__ == "__main__":
    main()
