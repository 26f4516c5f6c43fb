"""Open a source, or a model's folder, in a process of its own: clients read HF_ENDPOINT and the like when imported.

Reads a list of requests from stdin, writes a list of answers.
"""

import json
import os
import sys

from rlhf.errors import RlhfError
from rlhf_hub.hub import Commits
from rlhf_hub.published import model_folder, pinned
from rlhf_runtime.config.data_section import SourceSection
from rlhf_runtime.data.loading import load_source


def answer(request):
    commits = Commits(request.pop("pins", {}))
    os.environ["HF_TOKEN"] = request.pop("token", "")
    try:
        if "model" in request:
            path = pinned(request.pop("model"), commits)
            folder = model_folder(path, **request)
            return {"path": path, "folder": folder, "pins": commits.record(), "notes": commits.notes}
        source = load_source(SourceSection(**request), commits)
        rows = [source[i].columns for i in range(len(source))]
        locations = [source.location(i) for i in range(len(source))]
        return {
            "rows": rows, "where": locations, "columns": source.columns, "fingerprint": source.fingerprint,
            "name": source.name, "pins": commits.record(), "notes": commits.notes,
        }  # fmt: skip
    except RlhfError as error:
        return {"error": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    json.dump([answer(request) for request in json.load(sys.stdin)], sys.stdout)
