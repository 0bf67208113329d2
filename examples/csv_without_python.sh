#!/bin/sh
# A table, no Python: a private model, an ε for every patient, and what everyone may know.
#
#     sh examples/csv_without_python.sh
#
# examples/clinic.csv is made up. Yours has a header, and a row per example.
set -eu

# Settings for the columns found. For real data, stop here: read and correct runs/clinic.toml.
mkdir -p runs
epsilons init examples/clinic.csv --target returned --out runs/clinic.toml

# Any setting can be changed on the way; Ctrl-C stops, `epsilons resume runs/clinic` goes on.
epsilons train runs/clinic.toml --out runs/clinic epsilon=3

# For the curator: what it cost, and a private table with a row per patient.
epsilons status runs/clinic
epsilons export runs/clinic --to runs/clinic.csv

# For one patient alone.
epsilons owner runs/clinic p17

# For everyone: the mean and quantiles of ε, with noise. It adds to what the training cost.
epsilons publish runs/clinic --epsilon 0.5 --delta 1e-5
