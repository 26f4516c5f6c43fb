"""The cases of skipped steps, checkpoints, exports and lost ranks that two ranks of a trainer run."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
from rlhf.errors import WorkerError

from rlhf_testing.rank_batches import batch, shares
from rlhf_testing.rank_case import held, same
from rlhf_testing.suite_losses import InfiniteGradient, InfiniteLoss, TokenLoss, ValueLoss
from rlhf_testing.trainer_rank_setup import TrainerRankSetup


class StateCases(TrainerRankSetup):
    """A part of :class:`rlhf_testing.trainer_rank_cases.TrainerRankCases`."""

    def case_critic_state(self, layout: str) -> Any:
        """A critic's checkpoint."""
        one, other = (self.trainer(layout, self.here(head="scalar")) for _ in range(2))
        self.steps(one, range(2), ValueLoss())
        one.save(self.folder / f"critic-saved-{layout}")
        other.load(self.folder / f"critic-saved-{layout}")
        numbers = [self.steps(of, [3], ValueLoss()) for of in (one, other)]
        return numbers[0] == numbers[1] and same(held(one), held(other))

    def case_skip(self, layout: str) -> Any:
        """A non-finite loss, and in the next step a non-finite gradient, on the last share of the batch only."""
        one, twin = (self.trainer(layout, ema_decay=0.5) for _ in range(2))
        last = self.rank // self.share == self.ranks // self.share - 1
        found = {}
        for broken in (InfiniteLoss(), InfiniteGradient()):
            before = held(one)
            one.accumulate(self.mine(0), TokenLoss(), {}, {})
            one.accumulate(self.mine(1), broken if last else TokenLoss(), {}, {})
            result = one.apply()
            found[broken.name] = [result.skipped, same(before, held(one)), one.skipped, one.coverage()]
        self.steps(twin, [0])
        twin.updates = one.updates = 2
        done = self.steps(one, [0])
        found["after"] = [done[0][3], same(held(one), held(twin)) and same(held(one, "ema"), held(twin, "ema"))]
        return found

    def case_resume(self, layout: str) -> Any:
        """Save after two steps, load into a trainer that was trained on other data, and continue with both."""
        one, other = (self.trainer(layout, ema_decay=0.9, schedule="cosine") for _ in range(2))
        self.steps(one, range(2))
        folder = self.folder / f"saved-{layout}"
        one.save(folder)
        self.steps(other, [7])
        other.load(folder)
        bits = same(held(one), held(other)) and same(held(one, "ema"), held(other, "ema"))
        one.offload()
        one.reload()
        numbers = self.steps(one, range(2, 5)), self.steps(other, range(2, 5))
        bits = bits and same(held(one), held(other)) and same(held(one, "ema"), held(other, "ema"))
        files = sorted(path.name for path in folder.iterdir())
        return {"bits": bits, "steps": numbers, "files": files, "updates": other.updates}

    def case_from_one(self, layout: str) -> Any:
        """Load the checkpoint that one rank saved."""
        one = self.trainer(layout, ema_decay=0.9)
        one.load(self.folder / "from_one")
        return self.steps(one, range(2, 5))

    def case_lora(self, layout: str) -> Any:
        """Views, export and checkpoint of adapters."""
        one = self.trainer(layout, lora={"rank": 4}, ema_decay=0.5)
        base = held(one, "base")
        self.steps(one, range(2))
        one.save(self.folder / f"lora-saved-{layout}")
        one.export(self.folder / f"lora-exported-{layout}")
        self.keep(f"lora-weights-{layout}", held(one))
        return {"base": same(base, held(one, "base")), "merged": not same(base, held(one))}

    def case_export(self, layout: str) -> Any:
        """Exports in several files, and how much of the model was whole at a time."""
        one = self.trainer(layout, ema_decay=0.9, export_shard_bytes=10_000, **self.export_options)
        self.steps(one, range(2))
        with self.gathering(one) as whole:
            one.export(self.folder / f"export-{layout}")
            one.export(self.folder / f"export-ema-{layout}", "ema")
        exported = dict(one.weights())
        self.keep(f"exported-{layout}", exported)
        return {"names": sorted(exported), "whole": max(whole)}

    def case_rows_resume(self, layout: str) -> Any:
        """Continue the checkpoint of one rank with rows that are divided over two ranks, and save."""
        one = self.trainer(layout, ema_decay=0.9, sequence_parallel=2)
        one.load(self.folder / "from_one")
        done = [one.update(shares(batch(n), 1)[0], TokenLoss(), {}, {})[1].grad_norm for n in range(2, 4)]
        one.save(self.folder / f"saved-rows-{layout}")
        self.keep(f"resumed-rows-{layout}", held(one))
        return done

    def case_timeout(self, layout: str) -> Any:
        """Rank 1 makes no call while rank 0 waits for it. This case is the last, because it breaks the group. Only the
        group that was joined gets a short timeout, to show that the trainer waits in no other group."""
        one = self.trainer(layout)
        torch.distributed.distributed_c10d._set_pg_timeout(timedelta(seconds=3))
        done = self.folder / "rank-0-is-done"
        if self.rank:
            while not done.exists():
                time.sleep(0.1)
            return ""
        try:
            one.accumulate(self.mine(0), TokenLoss(), {}, {})
        except WorkerError as error:
            return str(error)
        finally:
            done.touch()
        return "nothing was raised"
