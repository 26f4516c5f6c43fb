"""The command: its flags, what it refuses before it starts, and its end."""

from __future__ import annotations

import signal
import socket

import httpx
import pytest
from rlhf_cli.main import main
from served import serving


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "no reward is named: there is nothing to serve"),
        (("--reward", "math", "--host", "0.0.0.0"), "can be reached from other machines, so clients must send a token"),
        (("--reward", "math", "--host", "example.org"), "--token-env NAME"),
        (("--reward", "math", "--token-env", "NOT_SET"), "this environment variable is not set"),
        (("--reward", "math", "--port", "70000"), "--port 70000 is not a port"),
        (("--reward", "math", "--timeout", "0"), "no request could be answered"),
        (
            ("--reward", "length", "--reward.length.low", "1"),
            "reads tokens, but requests contain text. Set --model PATH",
        ),
        (
            ("--reward", "math", "--reward.math.credit", "step"),
            "a response has one number per sample, not one per step",
        ),
        (("--reward", "math", "--reward.math.sources", '["a"]'), "does not say which source its samples are from"),
        (("--reward", "math", "--env.use", "number_game"), "a request does not describe an environment"),
    ],
)
def test_what_cannot_be_served_is_refused_before_the_start(words, message, capsys, monkeypatch) -> None:
    monkeypatch.delenv("NOT_SET", raising=False)
    assert main(["serve-reward", "--port", "0", *words]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_port_that_is_taken_is_named(capsys) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = str(listener.getsockname()[1])
        assert main(["serve-reward", "--reward", "math", "--port", port]) == 2
    error = capsys.readouterr().err
    assert f"cannot listen on 127.0.0.1 port {port}" in error
    assert "another --port" in error


def test_a_reward_that_cannot_start_ends_the_server(tmp_path) -> None:
    (tmp_path / "broken.py").write_text(
        "from rlhf.interfaces import Reward\n\nclass Broken(Reward):\n    reads = 'text'\n"
        "    async def setup(self, context):\n        raise OSError('no such host')\n"
        "    async def score(self, group):\n        return []\n"
    )
    with pytest.raises(Exception, match="no such host"), serving(("reward", f"file:{tmp_path / 'broken.py'}")):
        pass


def test_a_signal_ends_the_process_cleanly(forks) -> None:
    process = forks.start(["serve-reward", "--reward", "math", "--port", "0"])
    try:
        process.until(lambda: "\n" in process.output)
        line = process.output.splitlines()[0]
        assert line.startswith("serving math at http://127.0.0.1:")
        body = {"query": ["1+1=2"], "prompts": ["1+1="], "labels": ["2"]}
        assert httpx.post(line.split()[-1], json=body).json()["rewards"] == [1.0]
    finally:
        process.kill(signal.SIGTERM)
    assert process.wait() == 0, process.output
    assert "SIGTERM: finishing the current requests, then stopping" in process.output
    assert "Traceback" not in process.output
