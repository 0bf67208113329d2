"""LoRA with `transformers.Trainer`: every step is private, and every text has its ε.

    python examples/transformers_lora.py

Stop it with Ctrl-C, and the same command goes on.

It runs offline: a small BERT with random weights, on made-up reviews. For a real model put its name
where CHECKPOINT says, and your texts where `reviews` makes some.
"""

import argparse
import random

import torch
from peft import LoraConfig, get_peft_model
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments

from epsilons.integrations.huggingface import PrivateTrainer, plan_of

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=float, default=10)
parser.add_argument("--texts", type=int, default=1000)
parser.add_argument("--out", default="runs/transformers_lora")
args = parser.parse_args()

NOUNS = ["room", "film", "meal", "staff"]
GOOD, BAD = ["lovely", "brilliant", "warm"], ["dull", "noisy", "cold"]
WORDS = ["<pad>", "the", "was", *NOUNS, *GOOD, *BAD]
LENGTH = 6


def reviews(n):
    """Made-up texts and whether each is favourable; one label in twenty is wrong."""
    draw = random.Random(n)
    tones = [draw.randrange(2) for _ in range(n)]
    texts = [f"the {draw.choice(NOUNS)} was {draw.choice((BAD, GOOD)[tone])}" for tone in tones]
    return texts, [tone ^ (draw.random() < 0.05) for tone in tones]


def tokenized(texts, labels):
    """One dictionary per text. CHECKPOINT: its AutoTokenizer does this."""
    for text, label in zip(texts, labels, strict=True):
        ids = [WORDS.index(word) for word in text.split()]
        empty = LENGTH - len(ids)
        yield {
            "input_ids": ids + [0] * empty,
            "attention_mask": [1] * len(ids) + [0] * empty,
            "labels": label,
        }


train, test = list(tokenized(*reviews(args.texts))), list(tokenized(*reviews(200)))
torch.manual_seed(0)  # the first weights; batches and noise are drawn secretly, elsewhere
# CHECKPOINT: here stands AutoModelForSequenceClassification.from_pretrained(name, num_labels=2),
# with a name as "bert-base-uncased"
model = BertForSequenceClassification(
    BertConfig(
        vocab_size=len(WORDS),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=LENGTH,
        num_labels=2,
        initializer_range=0.3,  # random weights this large tell words apart
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
)
model = get_peft_model(
    model,
    LoraConfig(task_type="SEQ_CLS", r=4, target_modules=["query", "value"]),
)

arguments = TrainingArguments(
    output_dir=f"{args.out}.trainer",
    per_device_train_batch_size=100,
    num_train_epochs=args.epochs,
    learning_rate=1e-2,
    max_grad_norm=1.0,  # the clip bound of each text's gradient
    save_strategy="no",
    logging_steps=10,
    report_to=[],
)
plan = plan_of(arguments, len(train), epsilon=4.0, delta=1e-4, refreshes_per_epoch=1)
trainer = PrivateTrainer(model=model, args=arguments, train_dataset=train, plan=plan, out=args.out)
trainer.train()

eps = trainer.epsilons()
accuracy = (trainer.predict(test).predictions.argmax(1) == [x["labels"] for x in test]).mean()
print(f"worst case   ε = {eps.worst_case} at δ = {eps.delta}: what is guaranteed to everyone")
print(f"private      half of the {len(eps)} texts have ε ≤ {eps.quantile(0.5)} ({eps.kind})")
print(f"private      accuracy on held-out texts: {accuracy:.1%}")
print(f"run folder   {args.out}; look at it with: epsilons status {args.out}")
