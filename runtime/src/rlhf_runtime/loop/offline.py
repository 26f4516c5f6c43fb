"""One offline run: take rows, learn. After `assemble` a step is the same as an online one."""

from __future__ import annotations

from rlhf_runtime.calls.algorithm_calls import assemble
from rlhf_runtime.loop.run import Run


def offline(run: Run) -> None:
    """The loop of every algorithm that learns from rows of the data: demonstrations, pairs, labels, steps."""
    for step in run.steps():  # from the last checkpoint on; ends early on a signal or early stop
        with run.timed("data"):
            batch, metrics = assemble(run.algorithm, run.next_examples())
        if batch is None:
            metrics |= run.nothing_to_learn(step)
        else:
            metrics |= run.learn(step, batch)  # annotate, credit, update: learn.py
        run.complete(step, batch, metrics)  # adapt; an error after this line loses no step
        if run.sampler is not None:  # the policy answers held-out rows
            with run.timed("sync"):
                metrics |= run.sync(version=step + 1)
        run.finish(step, metrics)  # evaluate, record, save
