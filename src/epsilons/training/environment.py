"""What a step's result depends on besides the run itself.

A step may be replayed with the same noise only if it will give the same result: two releases with
the same noise and different sums would reveal their difference.
"""

from __future__ import annotations

import json
import os
import platform
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from epsilons.training.distributed import Ranks
from epsilons.training.shards import Shards

_BOOT = Path("/proc/sys/kernel/random/boot_id")


def usable_device(device: torch.device | str) -> torch.device:
    """The device; a `ValueError` unless a tensor can be put there."""
    try:
        where = torch.device(device)
        torch.empty(1, device=where)
    # torch refuses in as many ways: an unknown name, a build without it, a driver that is missing
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(
            f"device={str(device)!r} can't be used here; expected 'cpu', or 'cuda' on a machine "
            "and with a torch that have it"
        ) from error
    return where


def environment(where: torch.device, compiled: bool) -> dict[str, str]:
    """Versions, processor, threads, device, settings, whether passes are compiled, and this boot.

    The boot is in it because what was written but not synced is lost with a machine, not with a
    process: after a reboot the record of replayed steps can't be trusted.
    """
    device = torch.cuda.get_device_name(where) if where.type == "cuda" else platform.machine()
    return {
        "epsilons": version("epsilons"),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "python": platform.python_version(),
        "device": f"{where.type} {device}",
        "threads": str(torch.get_num_threads()),
        "deterministic": str(torch.are_deterministic_algorithms_enabled()),
        "reproducible products": os.environ.get("MKL_CBWR", ""),
        "compiled": str(compiled),
        "precision": torch.get_float32_matmul_precision(),
        "boot": _BOOT.read_text().strip() if _BOOT.exists() else platform.node(),
    }


def environment_of_all(ranks: Ranks, shards: Shards, here: dict[str, str]) -> dict[str, str]:
    """What the processes have together, `here` being this one's: the same for any number of them.

    The boot is that of rank 0, which has the files. Of each shard it says where it is gone through,
    as far as that is elsewhere than the first.
    """
    if shards.count == 1:
        return here
    every = ranks.together(lambda: {k: v for k, v in here.items() if k != "boot"})
    places = [
        json.dumps(every[rank], sort_keys=True)
        for rank, (first, last) in enumerate(pairwise(shards.rank_numbers))
        for _ in range(first, last)
    ]
    other = {f"shard {k}": place for k, place in enumerate(places) if place != places[0]}
    return {**every[0], "boot": here["boot"], "shards": str(shards.count), **other}
