"""The output of a process reward model: the log-odds that a step is right, at the step's last token.

Two kinds of model have this output: a model with two classes (0 wrong, 1 right), and a language model whose logits are
restricted to two label tokens. Log-odds l give the probability sigma(l), which is the softmax over the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf.types import Head

STEP_END = "step_end"
"""Mask of the tokens that end a step."""
CLASSES = "classes:2"
"""``RoleSpec.head`` of a model with two classes."""
RIGHT_TOKEN, WRONG_TOKEN = "right_token_id", "wrong_token_id"
"""Keys of a language model's ``config.json`` that hold the ids of its label tokens."""


def _difference(outputs_CV: Any, ids_C: Any, columns: Mapping[str, Any], constants: Mapping[str, Any]) -> Any:
    right, wrong = constants["outputs"]
    return outputs_CV[:, right] - outputs_CV[:, wrong]


def step_logits(right: int = 1, wrong: int = 0) -> Head:
    """Log-odds [A] of the steps that end at the A tokens under the mask :data:`STEP_END`.

    Args:
        right, wrong: indices of the outputs: two classes, or ids of two label tokens.
    """
    return Head("step_logits", _difference, over=STEP_END, position="at", constants={"outputs": (right, wrong)})
