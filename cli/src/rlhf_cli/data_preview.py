"""Show rows as the model will see them: `rlhf data preview run.toml`, or `--algo NAME --model PATH --data FILE`.

The run file and flags are those of `rlhf train`. The tokenizer is loaded, no model is. Rows come as they are written.
"""

from __future__ import annotations

import argparse
import json
import sys

from rlhf_cli.flags import add_short_flags, overrides

OVERRIDES = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_file", nargs="?", metavar="RUN.TOML", help="run file; flags are laid over it")
    add_short_flags(parser)
    parser.add_argument("--rows", type=int, default=3, metavar="N", help="how many rows to show (default: 3)")
    parser.add_argument("--json", action="store_true", help="one JSON object")


def run(args: argparse.Namespace) -> int:
    from rlhf.config import load
    from rlhf.data.dataset import TrainData
    from rlhf.data.tokenizer import load_tokenizer
    from rlhf.errors import ConfigError
    from rlhf.plugins import Plugins

    config = load(args.run_file, overrides(args))
    if config.policy.model is None:
        raise ConfigError("no model is named. Set --model PATH (a folder or a hub name).")
    form = Plugins.discover().resolve("algorithm", config.algorithm.use).cls.data
    tokenizer = load_tokenizer(config.policy.model, config.policy.trust_remote_code)
    section = config.data.model_copy(update={"shuffle": False})
    data = TrainData(section, tokenizer, form, config.run.seed)
    shown = [{"row": dict(row.columns)} for row in data.take(args.rows)]
    sys.stdout.write(json.dumps({"form": form, "rows": shown}) + "\n")
    return 0
