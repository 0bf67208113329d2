"""python -m experiments all|NAME… --preset smoke|cpu|paper --data DIR

Trains what the experiments need, once for all of them, and writes each one's numbers (JSON) and
picture as soon as they are known. The same call again goes on where it was interrupted.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from experiments.catalogue import EXPERIMENTS
from experiments.conduct import conduct
from experiments.lab import Lab
from experiments.presets import PRESETS

ROOT = Path(__file__).parent


def main(arguments: list[str] | None = None) -> int:
    ask = argparse.ArgumentParser(prog="python -m experiments", description=__doc__)
    ask.add_argument("names", nargs="+", metavar="NAME", help=f"all, or {', '.join(EXPERIMENTS)}")
    ask.add_argument("--preset", choices=sorted(PRESETS), default="smoke")
    ask.add_argument("--data", type=Path, help="folder with the public data sets")
    ask.add_argument("--out", type=Path, default=Path("runs/experiments"), help="folder of runs")
    ask.add_argument("--results", type=Path, help="folder of JSON (default: OUT/PRESET/results)")
    ask.add_argument("--pictures", type=Path, help="folder of pictures (default: beside the JSON)")
    ask.add_argument("--workers", type=int, default=1, help="trainings at a time")
    ask.add_argument("--again", action="store_true", help="train and measure anew")
    given = ask.parse_args(arguments)
    names = list(EXPERIMENTS) if given.names == ["all"] else given.names
    unknown = [name for name in names if name not in EXPERIMENTS]
    if unknown:
        return _refused(f"{unknown[0]!r} is no experiment; expected all, {', '.join(EXPERIMENTS)}")
    if given.workers < 1:
        return _refused(f"--workers {given.workers}; expected at least 1")
    if given.data is not None and not given.data.is_dir():
        return _refused(f"--data {given.data} is not a folder")
    lab = Lab(given.preset, given.data, given.out)
    results = given.results or lab.folder / "results"
    pictures = given.pictures or results
    try:
        conduct(lab, names, results, pictures, again=given.again, workers=given.workers,
                named=given.names != ["all"])  # fmt: skip
    except ValueError as error:
        return _refused(str(error))
    except KeyboardInterrupt:
        print("stopped; the same call goes on from here", file=sys.stderr)
        return 130
    return 0


def _refused(why: str) -> int:
    print(f"experiments: {why}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
