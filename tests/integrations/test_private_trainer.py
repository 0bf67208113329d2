"""transformers' Trainer on our own steps: tiny models with random weights, without Opacus."""

import importlib
import math
import os
import sys

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

os.environ.setdefault("HF_HUB_OFFLINE", "1")
tf = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
tf.utils.logging.set_verbosity_error()

from epsilons import Examples, Plan, Run  # noqa: E402
from epsilons.gradients import UnsupportedLayer, gradient_norms  # noqa: E402
from epsilons.integrations import huggingface  # noqa: E402
from epsilons.integrations.huggingface import (  # noqa: E402
    PrivateTrainer,
    per_example_loss,
    plan_of,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.filterwarnings("error:after .* steps these trainable parameters"),
]
N, LENGTH, WORDS = 40, 6, 50


class Sentences(Dataset):
    """Word numbers of sentences of 2 to 6 words, padded with 0; `labels(words, mask)` of each."""

    def __init__(self, labels, n=N):
        generator = torch.Generator().manual_seed(0)
        words = torch.randint(5, WORDS, (n, LENGTH), generator=generator)
        self.mask = (torch.arange(LENGTH) < 2 + torch.arange(n)[:, None] % 5).long()
        self.words = words * self.mask
        self.labels = labels(self.words, self.mask)

    def __len__(self):
        return len(self.words)

    def __getitem__(self, k):
        return {
            "input_ids": self.words[k], "attention_mask": self.mask[k], "labels": self.labels[k]
        }  # fmt: skip


def parity(words, mask):
    return words[:, 0] % 2


def numbers(words, mask):
    return words[:, 0] / WORDS


def several(words, mask):
    return (words[:, :2] % 2).float()


def next_words(words, mask):
    return words.where(mask == 1, -100)


def kinds_of_words(words, mask):
    return (words % 2).where(mask == 1, -100)


def bert(kind=tf.BertForSequenceClassification, **options):
    options = {
        "num_labels": 2, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, **options
    }  # fmt: skip
    config = tf.BertConfig(
        vocab_size=WORDS, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16, max_position_embeddings=LENGTH, **options,
    )  # fmt: skip
    torch.manual_seed(0)
    return kind(config).train()


def gpt2(**options):
    config = tf.GPT2Config(
        vocab_size=WORDS, n_embd=8, n_layer=1, n_head=2, n_positions=LENGTH, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=2, pad_token_id=0, **options,
    )  # fmt: skip
    torch.manual_seed(0)
    return tf.GPT2LMHeadModel(config).train()


def t5():
    config = tf.T5Config(
        vocab_size=WORDS, d_model=8, d_kv=4, d_ff=16, num_layers=1, num_heads=2, dropout_rate=0.0,
        decoder_start_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    return tf.T5ForConditionalGeneration(config).train()


def lora(dora=False):
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", r=2, target_modules=["c_attn"], use_dora=dora, fan_in_fan_out=True
    )
    return peft.get_peft_model(gpt2(), config).train()


def arguments(tmp_path, **options):
    options = {
        "max_steps": 4, "per_device_train_batch_size": 10, "learning_rate": 0.02,
        "save_strategy": "no", "logging_strategy": "no", "optim": "sgd", **options,
    }  # fmt: skip
    return tf.TrainingArguments(
        output_dir=str(tmp_path / "hf"), report_to=[], use_cpu=True, disable_tqdm=True, **options
    )


def trainer(tmp_path, model=None, data=None, *, private=None, out="run", callbacks=(), **options):
    own = {
        name: options.pop(name)
        for name in (
            "loss_fn", "data_collator", "eval_dataset", "compute_metrics", "seed", "correct_fn",
            "eval_examples", "follow",
        )
        if name in options
    }  # fmt: skip
    args = arguments(tmp_path, **options)
    data = Sentences(parity) if data is None else data
    return PrivateTrainer(
        model=bert() if model is None else model, args=args, train_dataset=data,
        plan=plan(8 if args.max_steps < 0 else args.max_steps) if private is None else private,
        out=tmp_path / out, callbacks=list(callbacks), **{"seed": 3, **own},
    )  # fmt: skip


def plan(steps, **options):
    return Plan(
        steps=steps, noise_multiplier=1.0, max_grad_norm=1.0, delta=1e-4,
        **{"n": N, "batch_size": 10, "refresh_every": 4, "sums": "float32", **options},
    )  # fmt: skip


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def own_losses_and_norms(model, data):
    """Of the model itself, one example at a time, by autograd."""
    trained = [p for p in model.parameters() if p.requires_grad]
    losses, norms = [], []
    for k in range(len(data)):
        loss = model(**{name: part[None] for name, part in data[k].items()}).loss
        found = torch.autograd.grad(loss, trained, allow_unused=True)
        losses.append(loss.item())
        norms.append(
            math.sqrt(sum(float(g.double().square().sum()) for g in found if g is not None))
        )
    return np.array(losses), np.array(norms)


@pytest.mark.parametrize(
    ("model", "labels"),
    [
        (bert, parity),
        (lambda: bert(num_labels=1), numbers),
        (lambda: bert(problem_type="multi_label_classification"), several),
        (lambda: bert(problem_type="regression"), several),
        (lambda: bert(tf.BertForTokenClassification), kinds_of_words),
        (lambda: bert(tf.BertForMaskedLM), next_words),
        (gpt2, next_words),
        (t5, next_words),
        (lora, next_words),
        (lambda: lora(dora=True), next_words),
    ],
    ids=[
        "class",
        "number",
        "several",
        "numbers",
        "token",
        "masked",
        "causal",
        "seq2seq",
        "lora",
        "dora",
    ],
)
def test_each_example_has_the_models_own_loss_of_it_and_the_norm_of_its_gradient(model, labels):
    model, data = model(), Sentences(labels, n=7)
    losses, norms = own_losses_and_norms(model, data)
    batch = {name: torch.stack([data[k][name] for k in range(7)]) for name in data[0]}
    np.testing.assert_allclose(per_example_loss(model, batch).detach(), losses, rtol=1e-5)
    found = gradient_norms(model, per_example_loss, data, batch_size=4)
    np.testing.assert_allclose(found, norms, rtol=1e-5)


@pytest.mark.parametrize(
    ("model", "labels", "trained"),
    [
        (bert, parity, "bert.embeddings.position_embeddings.weight"),
        (gpt2, next_words, "transformer.wte.weight"),
        (lora, next_words, "lora_A"),
        (lambda: lora(dora=True), next_words, "lora_magnitude_vector"),
    ],
    ids=["bert", "gpt2", "lora", "dora"],
)
def test_what_a_trainer_records_is_the_norm_of_each_example_by_itself(
    tmp_path, model, labels, trained
):
    model, data = model(), Sentences(labels)
    assert any(trained in name for name, p in model.named_parameters() if p.requires_grad)
    _, norms = own_losses_and_norms(model, data)
    mine = trainer(tmp_path, model, data, max_steps=10 if "lora" in trained else 2)
    mine.train()
    journal = mine.run.journal
    charged = journal.margin.charged(norms, journal.plan.all_phases)
    np.testing.assert_allclose(journal.norms(0), charged, rtol=1e-5)
    assert mine.run.finished


class Stop(tf.TrainerCallback):
    """Ends training in the body of a step; notes epochs that ended, and the step of each."""

    def __init__(self, at=None, error=RuntimeError):
        self.at, self.error, self.ended = at, error, []

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.at:
            raise self.error("stop")

    def on_epoch_end(self, args, state, control, **kwargs):
        self.ended.append((state.epoch, state.global_step))


WHOLE = {
    "max_steps": -1, "num_train_epochs": 2, "logging_strategy": "steps", "logging_steps": 1,
    "optim": "adamw_torch", "lr_scheduler_type": "cosine", "warmup_steps": 2,
}  # fmt: skip


def test_a_trainer_that_was_left_ends_with_the_same_bits_and_logs(tmp_path):
    seen = Stop()
    one = trainer(tmp_path, out="one", callbacks=[seen], **WHOLE)
    result = one.train()
    assert (result.global_step, seen.ended) == (8, [(1.0, 4), (2.0, 8)])

    with pytest.raises(KeyboardInterrupt):
        trainer(tmp_path, callbacks=[Stop(3, KeyboardInterrupt)], **WHOLE).train()
    again = Stop()
    other = trainer(tmp_path, callbacks=[again], **WHOLE)
    other.train()
    assert torch.equal(weights(one.model), weights(other.model))
    assert again.ended == seen.ended
    assert other.run.journal.repeated == 0
    known = ("loss", "learning_rate", "epoch", "step", "worst_case")
    logs = [[{k: log[k] for k in known} for log in t.state.log_history[:-1]] for t in (one, other)]
    assert logs[1] == logs[0][2:]
    assert result.metrics["worst_case"] == one.run.journal.worst_case() == one.epsilons().worst_case


def test_the_same_trainer_goes_on_and_a_finished_run_gives_its_weights(tmp_path):
    stop = Stop(2)
    mine = trainer(tmp_path, callbacks=[stop], **WHOLE)
    with pytest.raises(RuntimeError, match="stop"):
        mine.train()
    stop.at = None
    mine.train()
    later = trainer(tmp_path, **WHOLE)
    assert later.train().global_step == 8
    assert torch.equal(weights(mine.model), weights(later.model))
    assert later.epsilons().values.shape == (N,)


def test_an_end_that_found_the_disk_full_is_made_up_for(tmp_path, monkeypatch):
    def full(*_):
        raise OSError("no room")

    with monkeypatch.context() as patch:
        patch.setattr("epsilons.training.private_training.seal_run", full)
        with pytest.raises(OSError, match="no room"):
            trainer(tmp_path).train()
    mine = trainer(tmp_path)
    assert mine.train().global_step == 4
    assert mine.run.finished
    assert mine.run.journal.repeated == 0


def test_accumulated_batches_are_one_private_step(tmp_path):
    """Of several accumulated only the last moved the optimizer, and all of them were charged."""
    one = trainer(tmp_path, out="one")
    one.train()
    other = trainer(tmp_path, per_device_train_batch_size=5, gradient_accumulation_steps=2)
    assert other.train().global_step == 4
    assert other.run.plan == one.run.plan
    torch.testing.assert_close(weights(one.model), weights(other.model), rtol=1e-5, atol=1e-6)


def test_evaluating_saving_and_predicting_are_the_trainers(tmp_path):
    options = {
        "max_steps": -1, "num_train_epochs": 2, "eval_strategy": "epoch", "save_strategy": "epoch",
        "metric_for_best_model": "rise", "load_best_model_at_end": True,
        "eval_dataset": Sentences(parity, n=8),
    }  # fmt: skip
    heights = iter([2.0, 1.0])

    def metrics(_):
        return {"rise": next(heights)}

    with pytest.raises(RuntimeError, match="stop"):
        trainer(tmp_path, compute_metrics=metrics, callbacks=[Stop(6)], **options).train()
    mine = trainer(tmp_path, compute_metrics=metrics, **options)
    mine.train()  # the best was before: it is remembered, and loaded
    assert mine.state.best_metric == 2.0
    best = bert().from_pretrained(tmp_path / "hf" / "checkpoint-4")
    assert torch.equal(weights(mine.model), weights(best))
    heights = iter([0.0])
    assert mine.predict(Sentences(parity, n=8)).predictions.shape == (8, 2)
    mine.save_model(tmp_path / "saved")
    saved = bert().from_pretrained(tmp_path / "saved")
    assert torch.equal(weights(saved), weights(mine.model))


def right(model, batch):
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return logits.argmax(1) == batch["labels"]


def test_with_correct_fn_the_run_has_every_examples_outcome(tmp_path):
    held_out = Sentences(parity, n=12)
    names = Examples([f"held out {k}" for k in range(12)], groups={"half": np.arange(12) // 6})
    one = trainer(
        tmp_path,
        correct_fn=right,
        eval_dataset=held_out,
        eval_examples=names,
        follow=5,
        max_steps=3,
    )
    one.train()
    run = Run.open(tmp_path / "run")
    model = one.model.eval()
    for found, data in ((run.examples, Sentences(parity)), (run.test, held_out)):
        batch = tf.default_data_collator([data[k] for k in range(len(data))])
        with torch.no_grad():
            np.testing.assert_allclose(found.losses, per_example_loss(model, batch), rtol=1e-5)
            assert found.correct.tolist() == right(model, batch).tolist()
    assert list(run.test.ids) == list(names.ids)
    chosen, norms = run.journal.followed()
    assert (len(chosen), norms.shape) == (5, (3, 5))


def test_outcomes_of_several_eval_datasets_are_refused(tmp_path):
    several = {"short": Sentences(parity, n=4), "long": Sentences(parity, n=5)}
    with pytest.raises(
        ValueError, match="several data sets, short, long; with correct_fn give the"
    ):
        trainer(tmp_path, correct_fn=right, eval_dataset=several)


def test_a_trainer_that_a_callback_stops_ends_its_run(tmp_path):
    class Enough(tf.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step == 2

    mine = trainer(tmp_path, callbacks=[Enough()])
    assert mine.train().global_step == 2
    assert mine.run.finished


def test_bfloat16_computes_in_it_and_keeps_float32_weights(tmp_path):
    one, other = trainer(tmp_path, out="one"), trainer(tmp_path, bf16=True)
    one.train()
    other.train()
    assert {p.dtype for p in other.model.parameters()} == {torch.float32}
    apart = (weights(one.model) - weights(other.model)).abs().max()
    assert 0 < apart < 0.01


def padded(examples, mask=True):
    """A batch padded to its longest."""
    longest = max(int(example["attention_mask"].sum()) for example in examples)
    batch = {
        name: torch.stack([example[name][:longest] for example in examples])
        for name in ("input_ids", "attention_mask")
    }
    batch["labels"] = torch.stack([example["labels"] for example in examples])
    return batch if mask else {k: v for k, v in batch.items() if k != "attention_mask"}


def test_padding_to_the_longest_of_a_batch_does_not_claim_to_cover_sums(tmp_path):
    """The longest of all examples was the one that was tried, and all batches seemed alike."""

    class LongestFirst(Sentences):
        def __init__(self):
            super().__init__(parity)
            order = self.mask.sum(1).argsort(descending=True)
            self.words, self.mask = self.words[order], self.mask[order]

    covered = plan(4, sums="float64")
    whole, dynamic = (
        trainer(tmp_path, data=LongestFirst(), out=out, private=covered, data_collator=collate)
        for out, collate in (("whole", tf.default_data_collator), ("dynamic", padded))
    )
    whole.train()
    dynamic.train()
    assert whole.run.journal.sums_covered
    assert not dynamic.run.journal.sums_covered
    np.testing.assert_allclose(dynamic.run.journal.norms(0), whole.run.journal.norms(0), rtol=1e-5)


def test_padding_that_no_mask_hides_is_refused(tmp_path):
    """Whoever joins a batch would change the gradients of all others in it, by their padding."""
    model = bert(initializer_range=0.5)
    mine = trainer(tmp_path, model, data_collator=lambda examples: padded(examples, mask=False))
    with pytest.raises(UnsupportedLayer, match="padding to the longest of a batch"):
        mine.train()
    assert not (tmp_path / "run").exists()


def test_words_masked_at_random_make_an_estimate(tmp_path):
    def masked(examples):
        batch = {k: torch.stack([e[k] for e in examples]) for k in ("input_ids", "attention_mask")}
        chosen = (torch.rand(batch["input_ids"].shape) < 0.3) & (batch["attention_mask"] == 1)
        batch["labels"] = batch["input_ids"].where(chosen, -100)
        batch["input_ids"] = batch["input_ids"].where(~chosen, 4)
        return batch

    exact = plan(2, refresh_every=1)
    mine = trainer(
        tmp_path, bert(tf.BertForMaskedLM), private=exact, max_steps=2, data_collator=masked
    )
    mine.train()
    assert exact.kind != "estimate"
    assert mine.epsilons().kind == "estimate"
    assert "data" in mine.run.journal.random


class OwnLoss(PrivateTrainer):
    def compute_loss(self, model, inputs, *arguments, **options):
        return 2 * super().compute_loss(model, inputs, *arguments, **options)


def test_a_loss_of_all_that_a_step_would_not_use_is_refused(tmp_path):
    args = arguments(tmp_path)
    options = {"args": args, "train_dataset": Sentences(parity), "out": tmp_path / "run",
               "plan": plan(8)}  # fmt: skip
    with pytest.raises(ValueError, match="compute_loss give one loss for all"):
        OwnLoss(model=bert(), **options)
    with pytest.raises(ValueError, match="compute_loss give one loss for all"):
        PrivateTrainer(model=bert(), compute_loss_func=lambda *_: 0, **options)
    OwnLoss(model=bert(), loss_fn=per_example_loss, **options)
    with pytest.raises(ValueError, match="label_smoothing_factor, "):
        trainer(tmp_path, label_smoothing_factor=0.1)


class Doubled(tf.BertForSequenceClassification):
    def forward(self, **inputs):
        out = super().forward(**inputs)
        out.loss = out.loss and 2 * out.loss
        return out


@pytest.mark.parametrize(
    ("options", "call", "sentence"),
    [
        ({}, {"resume_from_checkpoint": True}, "goes on with .* by itself"),
        ({}, {"trial": {}}, "hyperparameter_search would train several"),
        ({"max_steps": 7}, {}, "the arguments give 7 steps and the plan has 4"),
        ({"model": bert(Doubled)}, {}, "Doubled gives an example the loss .*; give loss_fn"),
        ({"model": torch.nn.Linear(2, 2)}, {}, "Linear is no model of transformers"),
        ({"data_collator": lambda e: {"input_ids": Sentences(parity).words}}, {}, "and no labels"),
    ],
)
def test_what_makes_no_sense_is_refused_before_the_first_step(tmp_path, options, call, sentence):
    mine = trainer(tmp_path, private=plan(4), **{"remove_unused_columns": False, **options})
    with pytest.raises(ValueError, match=sentence):
        mine.train(**call)
    assert not (tmp_path / "run").exists()


def test_a_plan_is_that_of_the_arguments(tmp_path):
    args = arguments(tmp_path, max_steps=-1, num_train_epochs=1.5, max_grad_norm=0.7,
                     per_device_train_batch_size=3, gradient_accumulation_steps=2)  # fmt: skip
    found = plan_of(args, N, epsilon=8.0, delta=1e-4, refreshes_per_epoch=1)
    assert (found.batch_size, found.steps, found.max_grad_norm) == (6, 11, 0.7)
    assert 7.9 < found.worst_case() <= 8.0


def test_arguments_that_private_steps_do_not_have_are_refused_at_the_door(tmp_path):
    with pytest.raises(ValueError, match="does not work with auto_find_batch_size"):
        trainer(tmp_path, auto_find_batch_size=True)


@pytest.mark.parametrize("name", ["huggingface", "lightning"])
def test_opacus_is_not_needed(monkeypatch, name):
    """Both could not be imported where Opacus was not installed."""
    for module in list(sys.modules):
        if module.split(".")[0] == "opacus" or module.startswith("epsilons.integrations"):
            monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "opacus", None)
    found = importlib.import_module(f"epsilons.integrations.{name}")
    assert found is not huggingface
    with pytest.raises(ImportError):
        importlib.import_module("epsilons.integrations.opacus")


def test_sentences_of_one_author_are_one_example(tmp_path):
    data, model = Sentences(parity), bert()
    authors = Examples(ids=np.arange(N), owners=[f"author-{k % 16}" for k in range(N)])
    trained = [p for p in model.parameters() if p.requires_grad]
    norms = []
    for author in range(16):
        its = [data[k] for k in range(author, N, 16)]
        loss = sum(model(**{name: part[None] for name, part in x.items()}).loss for x in its)
        found = torch.autograd.grad(loss, trained, allow_unused=True)
        norms.append(
            math.sqrt(sum(float(g.double().square().sum()) for g in found if g is not None))
        )
    found = PrivateTrainer(
        model=model, args=arguments(tmp_path), train_dataset=data, seed=3, out=tmp_path / "run",
        plan=plan(4, n=16, batch_size=4, unit="owner", max_records_per_owner=3),
        examples=authors,
    )  # fmt: skip
    found.train()
    assert found.run.journal.ids.tolist() == [f"author-{k}" for k in range(16)]
    np.testing.assert_allclose(found.run.journal.norms(0), np.array(norms) * 1.0001, rtol=1e-5)
