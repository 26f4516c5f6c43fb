"""The data of a run (rows, turns, trajectories, groups) and the declarations that plugins make.

Nothing here imports torch, so rewards, environments and the command line start fast. Operations on these objects are
in :mod:`rlhf.ops`; tensors first appear in :class:`rlhf.ops.batch.Batch`.
"""

from rlhf.types.experts import ExpertLayers, ExpertRecord
from rlhf.types.generation import EnvStep, GenerationRequest, Sampling
from rlhf.types.images import Image
from rlhf.types.learning import Annotation, Snapshot, Update
from rlhf.types.losses import Head, How, Level, LossOutput, Reduce
from rlhf.types.needs import DataForm, Lent, Needs, OnlineShape, RoleSpec, RunOptions
from rlhf.types.rows import Row
from rlhf.types.trajectories import Finish, Group, RewardResult, Status, Trajectory, Turn

__all__ = [  # noqa: RUF022 - the order in which a reader meets them, and that of their page in docs/reference
    "Row", "Image", "ExpertLayers", "ExpertRecord", "Finish", "Turn", "RewardResult", "Status", "Trajectory", "Group",
    "Sampling", "GenerationRequest", "EnvStep",
    "DataForm", "RoleSpec", "Lent", "Needs", "RunOptions", "OnlineShape",
    "How", "Reduce", "Head", "Annotation", "Update", "Snapshot", "Level", "LossOutput",
]  # fmt: skip
