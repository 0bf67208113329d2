"""Draw the README's picture: python docs/pictures/make.py [RUN]

Without a run, the demo's is trained first (under a minute).
"""

import sys
import tempfile
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure

from epsilons import Run, job
from epsilons.analysis.figures import epsilon_histogram

with tempfile.TemporaryDirectory() as folder, rc_context({"font.size": 11}):
    run = Run.open(sys.argv[1]) if len(sys.argv) > 1 else job.demo(Path(folder) / "demo")
    figure = Figure(figsize=(7.5, 3), layout="constrained", dpi=160)
    epsilon_histogram(figure.add_subplot(), run.epsilons())
    figure.savefig(Path(__file__).parent / "demo.png")
