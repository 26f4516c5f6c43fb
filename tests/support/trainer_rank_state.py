"""The cases of skipped steps, checkpoints, exports and lost ranks that two ranks of a trainer run."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
from rlhf.errors import WorkerError
from rlhf.interfaces.model import PARTS
from rlhf_testing.suite_losses import InfiniteGradient, InfiniteLoss, TokenLoss, ValueLoss

from tests.support.rank_batches import batch, shares
from tests.support.rank_case import held, same
from tests.support.trainer_rank_setup import TrainerRankSetup


class StateCases(TrainerRankSetup):
    """A part of :class:`tests.support.trainer_rank_cases.TrainerRankCases`."""

    def case_critic_state(self, layout: str) -> Any:
        """A critic's checkpoint."""
        trainer, other = (self.trainer(layout, self.here(head="scalar")) for _ in range(2))
        self.steps(trainer, range(2), ValueLoss())
        trainer.save(self.folder / f"critic-saved-{layout}")
        other.load(self.folder / f"critic-saved-{layout}")
        numbers = [self.steps(instance, [3], ValueLoss()) for instance in (trainer, other)]
        return numbers[0] == numbers[1] and same(held(trainer), held(other))

    def case_skip(self, layout: str) -> Any:
        """A non-finite loss, and in the next step a non-finite gradient, on the last share of the batch only."""
        trainer, twin = (self.trainer(layout, ema_decay=0.5) for _ in range(2))
        last = self.rank // self.share == self.ranks // self.share - 1
        reports = {}
        for broken in (InfiniteLoss(), InfiniteGradient()):
            initial = held(trainer)
            trainer.accumulate(self.mine(0), TokenLoss(), {}, {})
            trainer.accumulate(self.mine(1), broken if last else TokenLoss(), {}, {})
            result = trainer.apply()
            reports[broken.name] = [result.skipped, same(initial, held(trainer)), trainer.skipped, trainer.coverage()]
        self.steps(twin, [0])
        twin.updates = trainer.updates = 2
        steps = self.steps(trainer, [0])
        reports["after"] = [
            steps[0][3],
            same(held(trainer), held(twin)) and same(held(trainer, "ema"), held(twin, "ema")),
        ]
        return reports

    def case_resume(self, layout: str) -> Any:
        """Save after two steps, load into a trainer that was trained on other data, and continue with both."""
        trainer, other = (self.trainer(layout, ema_decay=0.9, schedule="cosine") for _ in range(2))
        self.steps(trainer, range(2))
        folder = self.folder / f"saved-{layout}"
        trainer.save(folder)
        self.steps(other, [7])
        other.load(folder)
        bits = same(held(trainer), held(other)) and same(held(trainer, "ema"), held(other, "ema"))
        trainer.offload()
        trainer.reload()
        numbers = self.steps(trainer, range(2, 5)), self.steps(other, range(2, 5))
        bits = bits and same(held(trainer), held(other)) and same(held(trainer, "ema"), held(other, "ema"))
        files = sorted(path.name for path in folder.iterdir())
        return {"bits": bits, "steps": numbers, "files": files, "updates": other.updates}

    def case_from_one(self, layout: str) -> Any:
        """Load the checkpoint that one rank saved."""
        trainer = self.trainer(layout, ema_decay=0.9)
        trainer.load(self.folder / "from_one")
        return self.steps(trainer, range(2, 5))

    def case_lora(self, layout: str) -> Any:
        """Views, export and checkpoint of adapters."""
        trainer = self.trainer(layout, lora={"rank": 4}, ema_decay=0.5)
        base = held(trainer, "base")
        self.steps(trainer, range(2))
        trainer.save(self.folder / f"lora-saved-{layout}")
        trainer.export(self.folder / f"lora-exported-{layout}")
        trainer.export(self.folder / f"lora-average-{layout}", "ema")
        self.keep(f"lora-weights-{layout}", held(trainer))
        self.keep(f"lora-parts-{layout}", held(trainer, PARTS))
        return {"base": same(base, held(trainer, "base")), "merged": not same(base, held(trainer))}

    def case_export(self, layout: str) -> Any:
        """Exports in several files, and how much of the model was whole at a time."""
        trainer = self.trainer(layout, ema_decay=0.9, export_shard_bytes=10_000, **self.export_options)
        self.steps(trainer, range(2))
        with self.gathering(trainer) as sizes:
            trainer.export(self.folder / f"export-{layout}")
            trainer.export(self.folder / f"export-ema-{layout}", "ema")
        exported = dict(trainer.weights())
        self.keep(f"exported-{layout}", exported)
        return {"names": sorted(exported), "whole": max(sizes)}

    def case_rows_resume(self, layout: str) -> Any:
        """Continue the checkpoint of one rank with rows that are divided over two ranks, and save."""
        trainer = self.trainer(layout, ema_decay=0.9, sequence_parallel=2)
        trainer.load(self.folder / "from_one")
        norms = [trainer.update(shares(batch(n), 1)[0], TokenLoss(), {}, {})[1].grad_norm for n in range(2, 4)]
        trainer.save(self.folder / f"saved-rows-{layout}")
        self.keep(f"resumed-rows-{layout}", held(trainer))
        return norms

    def case_timeout(self, layout: str) -> Any:
        """Rank 1 makes no call while rank 0 waits for it. This case is the last, because it breaks the group. Only the
        group that was joined gets a short timeout, to show that the trainer waits in no other group."""
        trainer = self.trainer(layout)
        torch.distributed.distributed_c10d._set_pg_timeout(timedelta(seconds=3))
        marker = self.folder / "rank-0-is-done"
        if self.rank:
            while not marker.exists():
                time.sleep(0.1)
            return ""
        try:
            trainer.accumulate(self.mine(0), TokenLoss(), {}, {})
        except WorkerError as error:
            return str(error)
        finally:
            marker.touch()
        return "nothing was raised"
