"""A tiny transformer with random weights, under Opacus, in Trainer and with Accelerate."""

import os

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")
from opacus import PrivacyEngine  # noqa: E402

from epsilons.integrations.huggingface import IndividualPrivacy  # noqa: E402
from epsilons.integrations.opacus import attach  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
N, LENGTH = 40, 6


class Sentences(Dataset):
    """Word numbers with a label, as a tokenizer gives them."""

    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.words = torch.randint(5, 50, (N, LENGTH), generator=generator)

    def __len__(self):
        return N

    def __getitem__(self, k):
        return {
            "input_ids": self.words[k],
            "attention_mask": torch.ones(LENGTH, dtype=torch.long),
            "labels": int(self.words[k, 0] % 2),
        }


def transformer():
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16, max_position_embeddings=LENGTH, num_labels=2,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.BertForSequenceClassification(config).train()
    # positions are shared by the batch, so that Opacus has no per-example gradient of theirs
    model.bert.embeddings.requires_grad_(False)
    return model


def loss_fn(model, batch):
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return nn.functional.cross_entropy(logits, batch["labels"], reduction="none")


def private(model):
    engine = PrivacyEngine(accountant="rdp")
    trained = [p for p in model.parameters() if p.requires_grad]
    hooks, optimizer, loader = engine.make_private(
        module=model, optimizer=torch.optim.SGD(trained, lr=0.1), noise_multiplier=1.5,
        data_loader=DataLoader(
            Sentences(), batch_size=10, collate_fn=transformers.default_data_collator
        ),
        max_grad_norm=1.0, wrap_model=False,
    )  # fmt: skip
    return engine, hooks, optimizer, loader


class Trainer(transformers.Trainer):
    """As under Opacus: with the loader that make_private returned."""

    def __init__(self, loader, **options):
        super().__init__(**options)
        self.loader = loader

    def get_train_dataloader(self):
        return self.loader


def test_a_trainer_under_opacus(tmp_path):
    model = transformer()
    engine, hooks, optimizer, loader = private(model)
    callback = IndividualPrivacy(
        loss_fn, hooks=hooks, delta=1e-5, out=tmp_path / "run", refresh_every=2
    )
    Trainer(
        loader, model=model, optimizers=(optimizer, None), callbacks=[callback],
        args=transformers.TrainingArguments(
            output_dir=str(tmp_path / "hf"), max_steps=6, report_to=[], use_cpu=True,
            save_strategy="no", logging_strategy="no", disable_tqdm=True,
        ),
    ).train()  # fmt: skip
    journal = callback.accounted.run.journal
    assert (journal.steps_charged, journal.refreshes) == (6, (0, 2, 4))
    assert engine.accountant.history == [(1.5, 0.25, 6)]
    assert callback.epsilons().values.shape == (N,)


class Once(transformers.TrainerCallback):
    """Ends the first training after three steps."""

    def __init__(self):
        self.over = False

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 3 and not self.over:
            self.over = True
            raise RuntimeError("stop")


def test_a_trainer_under_opacus_goes_on_after_an_exception(tmp_path):
    """Accounting was attached still, and the second train() was refused."""
    model = transformer()
    engine, hooks, optimizer, loader = private(model)
    callback = IndividualPrivacy(loss_fn, hooks=hooks, delta=1e-5, out=tmp_path / "run")
    trainer = Trainer(
        loader, model=model, optimizers=(optimizer, None), callbacks=[callback, Once()],
        args=transformers.TrainingArguments(
            output_dir=str(tmp_path / "hf"), max_steps=4, report_to=[], use_cpu=True,
            save_strategy="no", logging_strategy="no", disable_tqdm=True,
        ),
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="stop"):
        trainer.train()
    trainer.train()
    journal = callback.accounted.run.journal
    assert (journal.steps_charged, journal.repeated) == (7, 0)
    assert engine.accountant.history == [(1.5, 0.25, 7)]


def test_the_trainers_own_loader_is_refused(tmp_path):
    model = transformer()
    _, hooks, optimizer, _ = private(model)
    callback = IndividualPrivacy(loss_fn, hooks=hooks, delta=1e-5, out=tmp_path / "run")
    trainer = transformers.Trainer(
        model=model, optimizers=(optimizer, None), callbacks=[callback],
        train_dataset=Sentences(),
        args=transformers.TrainingArguments(
            output_dir=str(tmp_path / "hf"), max_steps=2, report_to=[], use_cpu=True,
            save_strategy="no", logging_strategy="no", disable_tqdm=True,
        ),
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"Sampler.*, not by Poisson sampling"):
        trainer.train()
    assert not (tmp_path / "run").exists()


def test_a_loop_with_accelerate(tmp_path):
    model = transformer()
    engine, hooks, optimizer, loader = private(model)
    accelerator = accelerate.Accelerator(cpu=True)
    optimizer, loader = accelerator.prepare(optimizer, loader)
    with attach(
        hooks, optimizer, loader, loss_fn=loss_fn, delta=1e-5, out=tmp_path / "run"
    ) as attached:
        for batch in loader:
            optimizer.zero_grad()
            accelerator.backward(model(**batch).loss)
            optimizer.step()
    assert attached.run.journal.steps_charged == engine.accountant.history[0][2] == 4


def test_nothing_before_training(tmp_path):
    with pytest.raises(ValueError, match="has not begun"):
        IndividualPrivacy(loss_fn, hooks=None, delta=1e-5, out=tmp_path / "run").epsilons()
