"""One online run: generate, score, learn, sync. Read it aloud: this is what a step does."""

from __future__ import annotations

from rlhf_runtime.loop.learn import learn
from rlhf_runtime.loop.run import OnlineRun


def online(run: OnlineRun) -> None:
    """Every algorithm that learns from its own samples, whatever its rollout, reward and environment.

    A step whose groups hold nothing to learn from updates nothing and is counted. A run without any update is an error
    (:meth:`Run.close` raises it).
    """
    for step in run.steps():  # resumes where the last checkpoint stood; ends early on a signal or early stop
        with run.generating():
            run.stream.start(step)  # every batch of this round (or up to step + staleness) is generated and scored
        ready = run.stream.take(step)  # this step's groups: filtered, refilled, in submission order
        batch, metrics = run.algorithm.assemble(ready.groups) if ready.groups else (None, {})
        if batch is None:
            metrics |= run.nothing_to_learn(step, ready)
        else:
            with run.learning(step):
                metrics |= learn(batch, run.algorithm, run.roles, run.seed, step, run.keep_skipped)
        with run.timed("sync"):
            metrics |= run.sync(version=step + 1)  # trainer -> generator, where anybody will sample with it
        run.finish(step, batch, metrics, ready)  # adapt, evaluate, record, save
