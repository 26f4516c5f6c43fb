"""One online run: generate, score, learn, sync. This page shows all parts of a step."""

from __future__ import annotations

from rlhf_runtime.calls.algorithm_calls import assemble
from rlhf_runtime.loop.run import OnlineRun


def online(run: OnlineRun) -> None:
    """The loop of every algorithm that learns from its own samples, for every rollout, reward and environment.

    A step whose groups have no training signal is counted but trains nothing. :meth:`Run.close` raises an error if a
    run had no update at all.
    """
    for step in run.steps():  # from the last checkpoint on; ends early on a signal or early stop
        with run.timed("generate"), run.sampler.phases.stay_awake():
            run.stream.start(step)  # generates what is missing up to step + staleness, or lets it be generated
            ready = run.stream.take(step)  # this step's groups: scored, filtered, refilled
        batch, metrics = assemble(run.algorithm, ready.groups) if ready.groups else (None, {})
        if batch is None:
            metrics |= run.nothing_to_learn(step, ready)
        else:
            metrics |= run.learn(step, batch)  # annotate, credit, update: learn.py
        run.complete(step, batch, metrics, ready)  # adapt, keep the samples; an error after this line loses no step
        with run.timed("sync"):
            metrics |= run.sync(version=step + 1)  # trainer -> generator, if samples will be drawn with it
        run.finish(step, metrics)  # evaluate, record, save
