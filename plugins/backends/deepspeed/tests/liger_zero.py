"""``TRITON_INTERPRET=1 python liger_zero.py FOLDER``: Liger's kernels under ZeRO, on one rank, in Triton's interpreter.

Prints {stage: norm-wise difference of the gradients from those of the trainer without them} as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from rlhf_testing.suite_losses import TokenLoss
from rlhf_testing.tiny import tiny_model

sys.path.append(str(Path(__file__).resolve().parents[4]))  # the root's tests are not on a script's path
from zero_cases import apart, batch, spec, trainer

from tests.interpreted import complete_the_interpreter

FOLDER = Path(sys.argv[1])


def main() -> None:
    complete_the_interpreter()
    tiny_model(FOLDER / "model", layers=1, hidden=16, heads=2, kv_heads=1, std=0.3)
    distances = {}
    for stage in (2, 3):
        gradients = []
        for kernels in ("liger", "none"):
            policy = trainer(spec(FOLDER, gradient_checkpointing=stage == 3), stage=stage, kernels=kernels)
            assert any("forward" in vars(m) for m in policy.module.modules()) is (kernels == "liger")
            policy.accumulate([batch(0, units=2)], TokenLoss(), {}, {})
            gradients.append(policy.gradients())
        distances[stage] = apart(*gradients)
    print(json.dumps(distances))


if __name__ == "__main__":
    main()
