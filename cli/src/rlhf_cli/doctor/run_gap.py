"""`rlhf doctor RUN`: compares the log-probs of a run's generator and trainer for the same tokens, as a report."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf.errors import ConfigError
from rlhf_runtime.config.command_line import overrides

from rlhf_cli.command_input import run_file_of
from rlhf_cli.command_output import note

if TYPE_CHECKING:
    from rlhf_runtime.jobs.mismatch import Mismatch

SAMPLES = 32
REMEDIES = {
    "arithmetic (batch composition)": "the trainer computes packed sequences differently from single ones: report this",
    "stale weights (as recorded)": "lower stream.staleness or stream.round, or set an importance correction",
    "arithmetic": "give policy.dtype and the generator's dtype the same value, or set an importance correction",
    "cut distribution": "remove sampling.top_p, top_k and min_p, or set an importance correction",
    "temperature": (
        "the generator reports log-probs without the temperature: let it report log-probs of the distribution that it "
        "samples from"
    ),
    "template": (
        "the prompts that the generator read differ from the recorded ones: give both the same tokenizer and template"
    ),
    "end tokens": "the generator reports other values for tokens that end a turn: compare its end tokens",
    "adapters (absent)": "the generator samples without the adapters: set sync.check = 'fail'",
    "adapters (merged in bf16)": (
        "the generator's weights lose a part of the adapters to rounding: let it keep fp32 weights, or set "
        "sync.adapters = 'alone' for a generator that computes in fp32"
    ),
    "experts": "set trainer.router_replay; if it is set, the recorded experts are not the experts that sampled",
}
OLDER = "the generator missed a sync: set sync.check = 'fail'"


def examine_run(args: argparse.Namespace) -> int:
    """Examine the run in the folder ``args.run_file`` and print the result."""
    from rlhf.plugins import Plugins
    from rlhf_runtime.config.load import load, look_for_models
    from rlhf_runtime.jobs.mismatch import examine, weights_kept
    from rlhf_runtime.report.recorded_samples import recorded_steps, samples_file

    folder = Path(args.run_file)
    if args.start or args.timeout is not None:
        raise ConfigError(
            "--start and --timeout are for checks of the installation; omit them for the folder of a run."
        )
    max_samples = SAMPLES if args.samples is None else args.samples
    if max_samples < 1:
        raise ConfigError(f"--samples {max_samples}: the number of samples to compare must be at least 1.")
    step = args.step
    if step is None:
        checkpoints = weights_kept(folder)
        step = max((step for step in recorded_steps(folder) if step - 1 in checkpoints), default=None)
    file, number = samples_file(folder, step)
    assert number is not None, "a folder has samples by step"
    config = load(run_file_of(folder), overrides(args))
    look_for_models(config)
    result = examine(config, Plugins.discover(), folder, file, number, max_samples, note)
    if args.json:
        sys.stdout.write(json.dumps({**asdict(result), "verdict": verdict(result)}, indent=2) + "\n")
    else:
        _print(result)
    return 0


def verdict(result: Mismatch) -> str:
    """One sentence with the causes, and what to do."""
    gap = f"The gap is {_nats(result.gap)} a token"
    if result.gap <= result.floor and not result.causes:
        return f"{gap}: generator and trainer agree, up to rounding."
    if not result.causes:
        reason = "the engine may compute with other weights."
        if result.approximation:
            reason = (
                f"{result.approximation} makes the engine compute less precisely than the trainer; this cause is not "
                "examined."
            )
        if result.unkept:
            reason = (
                f"the weights of the versions {result.unkept}, which sampled tokens here, are not kept. Run with "
                "--checkpoint.every 1 and a larger --checkpoint.keep to examine them."
            )
        return f"{gap}, and no cause that could be examined explains it: {reason}"
    names = [f"{cause} ({result.ways[cause]})" if cause in result.ways else cause for cause in result.causes]
    rest = f"without {'it' if len(result.causes) == 1 else 'them'} {_nats(result.left)} would remain"
    if "arithmetic" in result.causes and result.rounding is not None and result.left > result.floor:
        part = "it" if result.left == result.gap else f"the rest, {_nats(result.left)},"
        rest = f"{part} is about as large as the difference between bf16 and fp32, {_nats(result.rounding)}"
    todo = "; ".join(
        OLDER if "older" in name else REMEDIES.get(name) or REMEDIES[name.split(" (")[0]] for name in names
    )
    return f"{gap}, because of {' and '.join(names)}: {rest}. To do: {todo}."


def _print(result: Mismatch) -> None:
    from rich.table import Table
    from rich.text import Text

    from rlhf_cli.runs.output import terminal

    console = terminal()
    console.print(
        f"step {result.step}: {result.tokens} tokens of {result.samples} samples, trainer in {result.dtype}; gap "
        f"{_nats(result.gap)} a token, kl_generator {result.kl:.3g}"
    )
    if result.reproduced is not None:
        console.print(f"the trainer's log-probs differ from the recorded log-probs by {_nats(result.reproduced)}")
    places = Table("position", "tokens", "gap", box=None)
    for part in result.bins:
        places.add_row(f"{part.first} to {part.last}", str(part.tokens), f"{part.gap:.3g}")
    console.print(places)
    causes = Table("cause", "gap left", "experiment", box=None)
    causes.add_row("(none)", f"{result.gap:.3g}", "the trainer as it computed in the run")
    for e in result.experiments:
        causes.add_row(e.cause, "-" if e.gap is None else f"{e.gap:.3g}", Text(e.note))
    console.print(causes)
    packed = f"Packing a sequence with others changes the trainer's log-probs by {_nats(result.composition)}"
    if result.rounding is not None:
        packed += f", bf16 in place of fp32 by {_nats(result.rounding)}"
    console.print(f"{packed}.", soft_wrap=True)
    console.print(Text(verdict(result), "bold"), soft_wrap=True)


def _nats(value: float) -> str:
    return f"{value:.3g} nats"
