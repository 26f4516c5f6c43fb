"""``rlhf plan``: which role is on which device, how much memory each phase needs there, and whether it fits.

A run file and flags become a :class:`Layout` (``from_run_file``). Trainers and generators state the memory of one rank
(``Trainer.memory``, ``Generator.memory``), and :func:`make_plan` adds it up per device and phase. No weights are loaded
and nothing is started.
"""

from rlhf_plugin_plan.from_run_file import resolve
from rlhf_plugin_plan.layout import DeviceGroup, EngineLayout, Layout, Machine, RoleLayout, View
from rlhf_plugin_plan.machines import target
from rlhf_plugin_plan.model_size import read_size
from rlhf_plugin_plan.nearest_change import Nearest, nearest
from rlhf_plugin_plan.phases import PARTS, PHASES, GroupPlan, Moment, sum_of
from rlhf_plugin_plan.report import as_json, describe, summary, verdict
from rlhf_plugin_plan.shortages import Plan, Shortage, make_plan
from rlhf_plugin_plan.units import parse, text

__all__ = [
    "PARTS", "PHASES", "DeviceGroup", "EngineLayout", "GroupPlan", "Layout", "Machine", "Moment", "Nearest", "Plan",
    "RoleLayout", "Shortage", "View", "as_json", "describe", "make_plan", "nearest", "parse", "read_size", "resolve",
    "sum_of", "summary", "target", "text", "verdict",
]  # fmt: skip
