"""The experiments by name, in the order of the paper."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType

from experiments import (
    adult,
    appendix_c,
    appendix_d,
    appendix_e,
    appendix_f,
    beyond_nearest,
    beyond_promises,
    beyond_rounding,
    beyond_schedules,
    beyond_tight,
    figure1,
    figure2,
    figure3,
    figure3_resnet20,
    figure4,
    figure5,
    figure7,
    imagenet,
    networks,
    sentences,
    table1,
    table2,
    table3,
    theorem31,
    utkface,
    utkface_resnet20,
)

EXPERIMENTS: Mapping[str, ModuleType] = {
    "theorem31": theorem31,
    "figure1": figure1,
    "figure2": figure2,
    "figure3": figure3,
    "figure3_resnet20": figure3_resnet20,
    "table1": table1,
    "figure4": figure4,
    "table2": table2,
    "figure5": figure5,
    "table3": table3,
    "figure7": figure7,
    "appendix_c": appendix_c,
    "appendix_d": appendix_d,
    "appendix_e": appendix_e,
    "appendix_f": appendix_f,
    "adult": adult,
    "utkface": utkface,
    "utkface_resnet20": utkface_resnet20,
    "imagenet": imagenet,
    "networks": networks,
    "sentences": sentences,
    "beyond_tight": beyond_tight,
    "beyond_schedules": beyond_schedules,
    "beyond_nearest": beyond_nearest,
    "beyond_rounding": beyond_rounding,
    "beyond_promises": beyond_promises,
}
