"""A small run for several processes, started by torchrun; says in a JSON file what came of it."""

import hashlib
import json
import os
import sys
from pathlib import Path

import numpy as np
import torch
import torch._dynamo  # the first optimizer would import it, in every process
from trained import LOSS, data, entries, plan, small_model, weights

from epsilons import Run
from epsilons.training import distributed, fit

CASES = {
    "max": dict(),
    "individual": dict(clipping="individual"),
    "every step": dict(refresh_every=1),
    "phases": dict(phases=((5, {"noise_multiplier": 1.5}), (8, {"batch_size": 30}))),
    "adam": dict(),
    "followed": dict(),
}


def trained_together(out, case, shards, seed=5):
    """The weights after a whole run of one case."""
    model = small_model(dropout=0.3)
    adam = case == "adam"
    kind = torch.optim.Adam if adam else torch.optim.SGD
    optimizer = kind(model.parameters(), lr=0.05 if adam else 0.5)
    fit(
        model, optimizer, LOSS, data(), plan(**CASES[case]), out=out, seed=seed, shards=shards,
        test=data(30, seed=1), follow=9 if case == "followed" else 0,
    )  # fmt: skip
    return weights(model)


def outcome(out, found):
    """What a run came to, as digests."""
    run = Run.open(out)
    return {
        "weights": digest(found.numpy()),
        "norms": digest(run.journal.norms(0)),
        "epsilons": digest(run.epsilons().values),
        "journal": hashlib.sha256(b"".join(map(plain, entries(run)))).hexdigest(),
        "losses": digest(run.examples.losses),
    }


def plain(entry):
    """An entry of the journal, in bytes that are the same for the same facts."""
    facts, indices, norms = entry
    arrays = (b"" if a is None else np.asarray(a).tobytes() for a in (indices, norms))
    return b"".join([repr(facts).encode(), *arrays])


def digest(values):
    return hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest()


def all_cases(folder, shards):
    found = {}
    for case in CASES:
        out = folder / case
        ends = trained_together(out, case, shards)
        if distributed.joined().main:
            found[case] = outcome(out, ends)
        found.setdefault(case, {})["own weights"] = digest(ends.numpy())
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    name, folder, *rest = sys.argv[1:]
    rank = os.environ.get("RANK", "0")
    result = globals()[name](Path(folder), *map(int, rest))
    (Path(folder) / f"said-{rank}.json").write_text(json.dumps(result))
