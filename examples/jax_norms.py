"""DP-SGD in JAX, priced by `epsilons account`: an ε per training example for other people's loops.

    pip install jax
    python examples/jax_norms.py

All that leaves JAX is a file of gradient norms: those of every example, measured every tenth step.
TensorFlow, or anything else that gives gradients per example, can write the same file.
"""

import argparse
import secrets
import subprocess
import sys
from pathlib import Path

import numpy as np

N, RATE, EVERY = 2000, 0.05, 10  # examples; sampling rate; steps between measurements
NOISE, BOUND, DELTA = 1.0, 1.0, 1e-4  # noise on the sum; clip bound C of a gradient; δ
RATE_OF_LEARNING = 2.0


def trained_in_jax(steps):
    """Norms (rows, N), one row for each measurement, of a logistic regression on made-up data."""
    import jax
    import jax.numpy as jnp

    made_up = np.random.default_rng(0)
    x = jnp.asarray(made_up.normal(size=(N, 10)) / np.sqrt(10))
    y = jnp.asarray(x[:, 0] + 0.1 * made_up.normal(size=N) > 0)

    def loss(weights, x, y):
        score = x @ weights["w"] + weights["b"]
        return jnp.logaddexp(0.0, jnp.where(y, -score, score))

    gradients = jax.vmap(jax.grad(loss), in_axes=(None, 0, 0))  # one per example

    def norms_of(each):
        squares = [jnp.sum(g.reshape(N, -1) ** 2, axis=1) for g in jax.tree.leaves(each)]
        return jnp.sqrt(sum(squares))

    @jax.jit
    def step(weights, key):
        each = gradients(weights, x, y)
        coins, noises = jax.random.split(key)
        drawn = jax.random.uniform(coins, (N,)) < RATE  # each example by its own coin
        factors = drawn * jnp.minimum(1.0, BOUND / norms_of(each))

        def moved(weight, g, key):
            noise = NOISE * jax.random.normal(key, weight.shape)
            return weight - RATE_OF_LEARNING / (N * RATE) * (jnp.tensordot(factors, g, 1) + noise)

        keys = dict(zip(weights, jax.random.split(noises, len(weights)), strict=True))
        return {name: moved(weights[name], each[name], keys[name]) for name in weights}

    @jax.jit
    def measured(weights):
        return norms_of(gradients(weights, x, y))

    key, rows = jax.random.key(secrets.randbits(63)), []
    weights = {"w": jnp.zeros(10), "b": jnp.zeros(())}
    for k in range(steps):
        if k % EVERY == 0:
            rows.append(measured(weights))
        weights = step(weights, jax.random.fold_in(key, k))
    right = jnp.mean((x @ weights["w"] + weights["b"] > 0) == y)
    print(f"JAX {jax.__version__} took {steps} steps; private: {right:.1%} of the examples right")
    return np.array(rows, dtype=np.float64)


def price(norms, steps, out):
    """Write the norms, and have `epsilons account` turn them into one ε per example."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "norms.npz").touch(mode=0o600)  # as private as the data
    held = np.diff([*range(0, steps, EVERY), steps])  # for how many steps each row was in force
    np.savez(out / "norms.npz", norms=norms * (1 + 1e-4), steps=held)  # room for rounding errors
    command = ["account", out / "norms.npz", "--out", out / "epsilons.csv"]
    options = {"sample-rate": RATE, "noise-std": NOISE, "max-grad-norm": BOUND, "delta": DELTA}
    command += [f"--{name}={value}" for name, value in options.items()]
    print("epsilons", *command)
    subprocess.run([sys.executable, "-m", "epsilons", *map(str, command)], check=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", type=Path, default=Path("runs/jax_norms"))
    args = parser.parse_args()
    try:
        norms = trained_in_jax(args.steps)
    except ImportError as missing:
        sys.exit(f"{missing}; this example trains in JAX: pip install jax")
    price(norms, args.steps, args.out)
