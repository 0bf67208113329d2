"""Draw the README's picture from a run: python docs/pictures/make.py RUN"""

import sys
from pathlib import Path

from matplotlib.figure import Figure

from epsilons import Run
from epsilons.analysis.figures import epsilon_histogram

run = Run.open(sys.argv[1])
figure = Figure(figsize=(7.5, 3), layout="constrained", dpi=160)
epsilon_histogram(figure.add_subplot(), run.epsilons())
figure.savefig(Path(__file__).parent / "demo.png")
