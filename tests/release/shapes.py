"""ε-distributions: two shaped like the paper's Table 2, and four that nothing was tuned on."""

import numpy as np
from scipy.interpolate import PchipInterpolator

QUANTILES = (0.1, 0.3, 0.5, 0.7, 0.9)
TABLE2 = {
    # shares and values of the paper's table, between the ends of its Figure 1
    "MNIST": (60_000, (0, 0.1, 0.3, 0.5, 0.7, 0.9, 0.97, 1),
              (0.15, 0.236, 0.318, 0.431, 0.697, 1.682, 2.4, 2.4)),
    "CIFAR-10": (50_000, (0, 0.1, 0.3, 0.5, 0.65, 0.7, 0.9, 1),
                 (1.0, 2.713, 4.892, 6.730, 7.5, 7.692, 7.815, 7.82)),
}  # fmt: skip


def like_table2(name):
    """(values (n,), worst case)."""
    n, shares, values = TABLE2[name]
    return PchipInterpolator(shares, values)((np.arange(n) + 0.5) / n), values[-1]


def unseen(name, n=50_000, worst=4.0):
    """(values (n,), worst case)."""
    rng = np.random.default_rng(11)
    half = n // 2
    drawn = {
        "bimodal": lambda: np.r_[rng.normal(0.5, 0.05, half), rng.normal(3.2, 0.1, n - half)],
        "at the worst case": lambda: np.r_[rng.uniform(0.5, worst, 2 * n // 5),
                                           np.full(n - 2 * n // 5, worst)],
        "one point": lambda: np.r_[rng.uniform(0.5, worst, n // 5), np.full(n - n // 5, 1.2345)],
        "heavy tail": lambda: 0.05 * (rng.pareto(1.1, n) + 1),
        "uniform": lambda: rng.uniform(0, worst, n),
    }[name]()  # fmt: skip
    return drawn.clip(0, worst), worst


UNSEEN = ("bimodal", "at the worst case", "one point", "heavy tail", "uniform")


def true_quantiles(values, shares=QUANTILES):
    return np.quantile(values, shares, method="inverted_cdf")


def rank_errors(values, found, shares=QUANTILES):
    """How far in rank each found value is from being the quantile."""
    ordered = np.sort(values)
    low = np.searchsorted(ordered, found, side="left") / len(values)
    high = np.searchsorted(ordered, found, side="right") / len(values)
    return np.maximum(0, np.maximum(low - shares, np.asarray(shares) - high))
