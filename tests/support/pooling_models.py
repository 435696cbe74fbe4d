"""Tiny pooling models, and what vLLM itself computes with them: `python -m ... KIND FOLDER`.

The embedding model is the demo model, and so is the reranker: vLLM compares the logits of two of
its tokens after a template. The others have random weights, so their results mean nothing: a
classifier with three labels, and two models that score pairs. One of these reads a pair as one
text, the other as two texts with token types (a BERT with its own tokenizer).
"""

import json
import sys
from pathlib import Path
from typing import Any, Final

from tests.support.stack import CHECKPOINT
from worker.demo_model import ADAPTERS

EMBED, CLASSIFY, JOINED, SEPARATED = "embed", "classify", "joined", "separated"
RERANKER = "reranker"
ADAPTER: Final = "red"
"""An adapter of the demo model."""
ENGINE_ARGUMENTS: Final[dict[str, dict[str, Any]]] = {
    EMBED: {"dtype": "float32"},
    CLASSIFY: {"dtype": "float32"},
    JOINED: {"dtype": "float32", "hf_overrides": {"use_sep_token": False}},
    SEPARATED: {"dtype": "float32"},
    RERANKER: {
        "dtype": "float32",
        "hf_overrides": {
            "architectures": ["LlamaForSequenceClassification"],
            "classifier_from_token": ["Ġfalse", "Ġtrue"],
            "method": "from_2_way_softmax",
        },
    },
}
TEMPLATE: Final = """<|im_start|>system
Judge whether the Document meets the Query.<|im_end|>
<|im_start|>user
<Instruct>: {{ instruction | default("Find the answer") }}
<Query>: {{ messages | selectattr("role", "eq", "query") | map(attribute="content") | first }}
<Document>: {{ messages | selectattr("role", "eq", "document") | map(attribute="content") | first }}
<|im_end|>
<|im_start|>assistant
"""
"""How the reranker reads a pair, in the form of Qwen3-Reranker's template."""
TEXTS: Final = ["The capital of France is Paris.", "x", "Once upon a time there was a king. " * 20]
QUERY: Final = "what is the capital of france?"
LABELS: Final = ("negative", "neutral", "positive")
_WORDS: Final = "[PAD] [UNK] [CLS] [SEP] [MASK] . ? the capital of france is paris once upon a time"


def model_folder(kind: str, folder: Path) -> Path:
    """Return where `main` writes a model."""
    return CHECKPOINT if kind in (EMBED, RERANKER) else folder / "model"


def make(kind: str, folder: Path) -> None:
    """Write a model with random weights, the same every time."""
    import torch
    import transformers

    torch.manual_seed(0)
    if kind == SEPARATED:
        letters = "abcdefghijklmnopqrstuvwxyz"
        words = [*_WORDS.split(), *letters, *(f"##{letter}" for letter in letters)]
        vocabulary = {word: number for number, word in enumerate(dict.fromkeys(words))}
        tokenizer: Any = transformers.BertTokenizerFast(vocab=vocabulary)
        config: Any = transformers.BertConfig(
            vocab_size=len(vocabulary),
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=128,
            num_labels=1,
            initializer_range=0.5,
        )
        model: Any = transformers.BertForSequenceClassification(config)
    else:
        tokenizer = transformers.AutoTokenizer.from_pretrained(CHECKPOINT)
        labels = LABELS if kind == CLASSIFY else LABELS[:1]
        config = transformers.LlamaConfig.from_pretrained(
            CHECKPOINT, id2label=dict(enumerate(labels)), num_labels=len(labels), pad_token_id=0
        )
        config.architectures = ["LlamaForSequenceClassification"]
        model = transformers.LlamaForSequenceClassification.from_pretrained(
            CHECKPOINT, config=config
        )
        torch.nn.init.normal_(model.score.weight, std=0.2)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def reference(kind: str, folder: Path, *, adapter: Path | None = None) -> list[Any]:
    """Return the results of vLLM's own interface for TEXTS, alone or as documents of QUERY.

    With an `adapter`, those of an embedding model are followed by those with the adapter.
    """
    from vllm import LLM
    from vllm.lora.request import LoRARequest

    options = ENGINE_ARGUMENTS[kind] | ({} if adapter is None else {"enable_lora": True})
    llm = LLM(str(folder), runner="pooling", enforce_eager=True, **options)
    if kind == EMBED:
        adapters = [None, *([LoRARequest("adapter", 1, str(adapter))] if adapter else [])]
        results = [llm.embed(TEXTS, lora_request=each) for each in adapters]
        return [each.outputs.embedding for several in results for each in several]
    if kind == CLASSIFY:
        return [each.outputs.probs for each in llm.classify(TEXTS)]
    template = TEMPLATE if kind == RERANKER else None
    return [each.outputs.score for each in llm.score(QUERY, TEXTS, chat_template=template)]


def main() -> None:
    """Write the model and its reference."""
    kind, folder = sys.argv[1], Path(sys.argv[2])
    model = model_folder(kind, folder)
    if model != CHECKPOINT:
        make(kind, model)
    adapter = ADAPTERS / ADAPTER if kind == EMBED else None
    (folder / "reference.json").write_text(json.dumps(reference(kind, model, adapter=adapter)))


if __name__ == "__main__":
    main()
