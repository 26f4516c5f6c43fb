"""The smallest program, for the conformance suite and the benchmark: a command that sends the row's prompt.

Only the standard library is imported here.
"""

import json
import os
import sys
import urllib.request


def main() -> None:
    task = json.load(sys.stdin)
    for _ in range(int(task.get("turns", 1))):
        body = {"model": "policy", "messages": [{"role": "user", "content": task["prompt"]}]}
        request = urllib.request.Request(
            os.environ["OPENAI_BASE_URL"] + "/chat/completions",
            data=json.dumps(body).encode(),
            headers={"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as answer:
            json.load(answer)


if __name__ == "__main__":
    main()
