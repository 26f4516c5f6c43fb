"""One offline run: take rows, learn. The step after `assemble` is the online one."""

from __future__ import annotations

from rlhf_runtime.loop.learn import catch_up, learn
from rlhf_runtime.loop.run import Run


def offline(run: Run) -> None:
    """Every algorithm that learns from given rows: demonstrations, pairs, labels, steps."""
    for step in run.steps():
        planned = run.algorithm.updates(step)  # asked before the batch is known: what a full one would be updated by
        with run.timed("data"):
            batch = run.algorithm.assemble(run.next_examples())
        if batch is None:
            metrics = run.nothing_to_learn(step)
        else:
            with run.learning():
                batch, metrics = learn(batch, run.algorithm, run.roles, run.seed, step, run.keep_skipped)
        catch_up(planned, run.roles)  # schedules move on by the optimizer steps that were planned
        if run.weights is not None:  # held-out rows are answered by the policy too
            with run.timed("sync"):
                metrics |= run.sync(version=step + 1)
        run.finish(step, metrics)  # observe, evaluate, checkpoint
