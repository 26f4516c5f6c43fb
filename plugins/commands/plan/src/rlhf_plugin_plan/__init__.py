"""``rlhf plan``: who is on which device, what memory that takes in which phase, and whether it fits.

A run file and flags become a :class:`Layout` of plain values (``resolving``), and pure functions (``formulas``) make a
:class:`Plan` of it. No weights are loaded and nothing is started.
"""

from rlhf_plugin_plan.changes import Nearest, nearest
from rlhf_plugin_plan.layers import LayerShape
from rlhf_plugin_plan.layout import DeviceGroup, EngineLayout, Layout, Machine, RoleLayout, View
from rlhf_plugin_plan.machines import target
from rlhf_plugin_plan.phases import PARTS, PHASES, GroupPlan, Moment, sum_of
from rlhf_plugin_plan.report import as_json, describe, summary, verdict
from rlhf_plugin_plan.resolving import resolve
from rlhf_plugin_plan.shape import ModelShape, read_shape
from rlhf_plugin_plan.sizes import parse, text
from rlhf_plugin_plan.verdicts import Plan, Shortage, make_plan

__all__ = [
    "PARTS", "PHASES", "DeviceGroup", "EngineLayout", "GroupPlan", "LayerShape", "Layout", "Machine", "ModelShape",
    "Moment", "Nearest", "Plan", "RoleLayout", "Shortage", "View", "as_json", "describe", "make_plan", "nearest",
    "parse", "read_shape", "resolve", "sum_of", "summary", "target", "text", "verdict",
]  # fmt: skip
