"""Upload a model to a hub."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rlhf import hookimpl
from rlhf.interfaces import Command
from rlhf.paths import path_argument

from rlhf_cli.command_output import note


class PushCommand(Command):
    """Upload a model's folder to a hub: `rlhf push runs/1/model owner/name`.

    The hub's own client uploads it, with the token of HF_TOKEN or `hf auth login`. A missing repository is created as
    private. HF_ENDPOINT names another hub.
    """

    name = "push"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("folder", type=path_argument, metavar="FOLDER", help="folder of a model, or of an adapter")
        parser.add_argument("repo", metavar="REPO", help="repository on the hub: owner/name")
        parser.add_argument("--public", action="store_true", help="create a new repository as public")

    def run(self, args: argparse.Namespace) -> int:
        from rlhf_hub.upload import push

        folder: Path = args.folder
        url = push(folder.expanduser(), args.repo, not args.public, note)
        sys.stdout.write(f"{folder}: {url}\n")
        return 0


@hookimpl
def rlhf_register_command() -> list[type[Command]]:
    return [PushCommand]
