"""Run an algorithm: `rlhf train run.toml`, or `rlhf train --algo NAME --model PATH --data FILE [--reward REF] ...`.

Every field of the run file is a dotted flag: `--algorithm.loss.clip_high 0.28`, `--reward.math.weight 2`. Flags are
laid over the file; `--dry-run` checks all that can be checked without loading a model and shows the resolved config.
"""

from __future__ import annotations

import argparse
import sys

from rlhf_cli.flags import add_short_flags, overrides

OVERRIDES = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_file", nargs="?", metavar="RUN.TOML", help="run file; flags are laid over it")
    add_short_flags(parser)
    parser.add_argument("--dry-run", action="store_true", help="resolve and check everything, load no model, stop")


def run(args: argparse.Namespace) -> int:
    from rlhf.plugins import Plugins
    from rlhf_runtime.config.load import load
    from rlhf_runtime.config.model_lookup import look_for_models

    config = load(args.run_file, overrides(args))
    look_for_models(config)
    plugins = Plugins.discover()
    if args.dry_run:
        return _dry_run(config, plugins)
    from rlhf_runtime.setup.build import train

    finished = train(config, plugins)
    sys.stdout.write(f"{finished.outcome}: {finished.directory.path}\n")
    return finished.exit_code


def _dry_run(config, plugins) -> int:  # type: ignore[no-untyped-def]
    from rlhf_plugin_plan import make_plan, resolve, summary, target
    from rlhf_runtime.config.load import to_toml
    from rlhf_runtime.setup.build import row_check
    from rlhf_runtime.setup.prepare import prepare
    from rlhf_runtime.setup.resume import check_output

    prepared = prepare(config, plugins)
    check_output(prepared)
    checked = row_check(prepared)
    checked.start()
    checked.wait()
    sys.stdout.write(to_toml(prepared.config))
    sys.stdout.write("\n# What this run would do\n")
    sys.stdout.write(f"# steps: {prepared.total_steps}, {prepared.data.rows_per_epoch} rows per epoch\n")
    for note in prepared.notes:
        sys.stdout.write(f"# {note}\n")
    for name, spec in prepared.specs.items():
        kind = "trained" if spec.role.trained else "frozen"
        updates = f", {spec.total_updates} optimizer steps" if spec.role.trained else ""
        sys.stdout.write(f"# role {name}: {spec.path} ({spec.role.head} head, {kind}{updates})\n")
    for plugin in prepared.plugins:
        sys.stdout.write(f"# plugin {plugin}\n")
    for line in summary(make_plan(resolve(config, plugins, target()))):
        sys.stdout.write(f"# {line}\n")
    return 0
