"""What the server answers: scores, and errors in JSON."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
import rlhf_cli.serve_reward.serving as serving_module
from rlhf_cli.serve_reward.access import Access
from served import Served, serving

FILE = '''
"""The reward is the number that the completion is. Words are wishes."""
import asyncio
import math
from pathlib import Path

async def score(prompt, completion, row):
    if completion.startswith("wait for "):
        Path(completion.removeprefix("wait for ") + ".there").touch()
        while not Path(completion.removeprefix("wait for ")).exists():
            await asyncio.sleep(0.01)
        return 7.0
    if completion == "skip":
        return None
    return float(completion)
'''
GROUPS = """
from rlhf.interfaces import Reward
from rlhf.types import RewardResult

class Longest(Reward):
    reads = "text"
    async def score(self, group):
        longest = max(len(t.answer) for t in group.trajectories)
        tell = {"samples": len(group.trajectories), "label": group.row.get("label"), "note": "no number"}
        return [RewardResult(float(len(t.answer) == longest), 5.0, info=tell) for t in group.trajectories]
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("reward") / "number.py"
    path.write_text(FILE)
    return f"file:{path}"


@pytest.fixture(scope="module")
def server(file):
    with serving(("reward", file), bytes=4096, samples=8) as served:
        yield served


def body(**keys) -> bytes:
    return json.dumps({"query": ["p1"], "prompts": ["p"], **keys}).encode()


def posted(server: Served, content: bytes, kind: str = "application/json") -> httpx.Response:
    return httpx.post(server.url, content=content, headers={"Content-Type": kind})


@contextlib.contextmanager
def waiting(server: Served, wish: Path, samples: int = 1) -> Iterator[tuple[Future[httpx.Response], Path]]:
    """A request under way, and the file that ends it."""
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(server.ask, [f"wait for {wish}"] * samples)
        while not Path(f"{wish}.there").exists():
            time.sleep(0.01)
        yield slow, wish


def answers(server: Served) -> bool:
    """Whether the server takes connections."""
    try:
        server.get("/health")
    except httpx.TransportError:
        return False
    return True


def test_the_answer_begins_where_the_prompt_ends(server) -> None:
    assert server.ask(["p1", "q2.5"], ["p", "q"]).json() == {"rewards": [1, 2.5], "scores": [1, 2.5], "extra_logs": {}}
    assert server.ask(["3"]).json()["rewards"] == [3.0], "with an empty prompt all of the query is the answer"


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (b"<html>", "the body is not JSON"),
        (b"[" * 4000, "the body is not JSON"),
        (b"[1]", "the body is list [1]; expected an object with the keys query, prompts, labels"),
        (body(label=["1"]), "unknown key 'label'; allowed: query, prompts, labels. Did you mean 'labels'?"),
        (b'{"prompts": ["p"]}', "the key 'query' is missing"),
        (b'{"query": ["p1"]}', "the key 'prompts' is missing. Rewards read only the answer."),
        (body(query="p1"), "query is str 'p1'; expected a list of at least one text"),
        (body(query=[], prompts=[]), "query is list []; expected a list of at least one text"),
        (body(query=[1]), "query[0] is int 1; expected text"),
        (body(query=["p\ud800"]), "query[0] contains half of a character"),
        (body(prompts=["p", "p"]), "1 texts in query, but 2 values in prompts"),
        (body(labels=[]), "1 texts in query, but 0 values in labels"),
        (body(labels="x"), "labels is str 'x'; expected a list"),
        (b'{"query": ["p1"], "query": ["p2"], "prompts": ["p"]}', "the key 'query' occurs 2 times in one object"),
        (b'{"query": ["p1"], "prompts": ["p"], "labels": [{"a": 1, "a": 2}]}', "the key 'a' occurs 2 times"),
        (body(labels=[float("nan")]), "NaN is a number that is not finite"),
        (body(prompts=["q"]), "query[0] does not begin with prompts[0]"),
    ],
)
def test_a_body_that_is_not_understood_is_refused(server, content, cause) -> None:
    answer = posted(server, content)
    assert answer.status_code == 400
    assert cause in answer.json()["error"]


def test_other_refusals_are_json_too(server) -> None:
    for answer, status, cause in (
        (posted(server, body(), "text/plain"), 415, "Content-Type is 'text/plain'; expected application/json"),
        (posted(server, b" " * 4097), 413, "the body is larger than 4096 bytes"),
        (server.ask(["1"] * 9), 413, "9 samples at once; the server takes at most 8"),
        (server.get("/elsewhere"), 404, "rewards are at POST /get_reward"),
        (server.get("/get_reward"), 405, "rewards are at POST /get_reward"),
    ):
        assert (answer.status_code, cause in answer.json()["error"]) == (status, True), answer.text


def test_a_sample_that_has_no_reward_makes_the_request_an_error(server) -> None:
    count = server.counts()["rlhf_reward_failed_samples_total"]
    answer = server.ask(["1", "nan", "x", "skip"])
    assert answer.status_code == 422
    causes = answer.json()["samples"]
    assert sorted(causes) == ["1", "2", "3"]
    assert "returned float nan" in causes["1"]
    assert "could not convert string to float: 'x'" in causes["2"]
    assert causes["3"] == "no reward applies to this sample"
    assert answer.json()["error"].startswith("query[1]: RewardError: reward 'number'")
    assert "rewards" not in answer.json()
    assert server.counts()["rlhf_reward_failed_samples_total"] == count + 3


def test_a_request_beyond_the_samples_under_way_is_asked_to_come_back(server, tmp_path: Path) -> None:
    with waiting(server, tmp_path / "go", 4) as (slow, wish):
        assert server.counts()["rlhf_reward_samples_under_way"] == 4
        refused, fits = server.ask(["1"] * 5), server.ask(["1"] * 4)
        wish.touch()
        assert slow.result().json()["rewards"] == [7.0] * 4
    assert (refused.status_code, fits.status_code) == (429, 200)
    assert refused.headers["Retry-After"] == "1"
    assert "4 samples are being processed, and 5 more exceed the limit of 8" in refused.json()["error"]
    assert server.counts()["rlhf_reward_samples_under_way"] == 0


def test_a_request_that_takes_too_long_is_unavailable_and_leaves_nothing(file, tmp_path) -> None:
    with serving(("reward", file), seconds=0.3) as server:
        answer = server.ask([f"wait for {tmp_path / 'never'}"])
        assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")
        assert answer.json()["error"] == "no result in 0.3 s"
        counts = server.counts()
        assert counts["rlhf_reward_samples_under_way"] == 0
        assert counts['rlhf_reward_requests_total{status="503"}'] == 1


def test_samples_of_one_prompt_and_label_are_a_group_and_infos_are_logs(tmp_path) -> None:
    (tmp_path / "longest.py").write_text(GROUPS)
    with serving(("reward", f"file:{tmp_path / 'longest.py'}")) as server:
        answer = server.ask(["pab", "qa", "pa", "pa"], ["p", "q", "p", "p"], labels=[1, 2, 1, 3]).json()
    assert answer == {
        "rewards": [1.0, 1.0, 0.0, 1.0],
        "scores": [5.0] * 4,
        "extra_logs": {"samples": [2, 1, 2, 1], "label": [1, 2, 1, 3]},
    }


def test_several_rewards_are_weighted_and_reported_each(file) -> None:
    half = ("reward.number.weight", "0.5")
    with serving(("reward", "math"), ("reward", file), half, ("reward.math.column", "gold"), label="gold") as server:
        answer = server.ask(["p4", "p3"], ["p", "p"], labels=["3", "3"]).json()
    assert answer["rewards"] == [2.0, 2.5]
    assert answer["extra_logs"] == {"math": [0.0, 1.0], "number": [4.0, 3.0]}


def test_a_token_is_asked_for_rewards_and_metrics(file) -> None:
    with serving(("reward", file), token="s3cret") as server:
        for headers in ({}, {"Authorization": "Bearer other"}, {"Authorization": "s3cret"}):
            answer = server.ask(["1"], headers=headers)
            assert (answer.status_code, answer.headers["WWW-Authenticate"]) == (401, "Bearer")
            assert "s3cret" not in answer.text
            assert server.get("/metrics", headers=headers).status_code == 401
        right = {"Authorization": "Bearer s3cret"}
        assert server.ask(["1"], headers=right).json()["rewards"] == [1.0]
        assert "rlhf_reward_samples_total 1.0" in server.get("/metrics", headers=right).text
        assert server.get("/health").json() == {"status": "ready"}


def test_a_web_page_needs_the_token(file) -> None:
    page = {"Origin": "https://elsewhere.example"}
    with serving(("reward", file)) as server:
        assert server.ask(["1"], headers=page).status_code == 403
        assert server.ask(["1"]).status_code == 200
    with serving(("reward", file), token="s3cret") as server:
        assert server.ask(["1"], headers=page | {"Authorization": "Bearer s3cret"}).status_code == 200


@pytest.mark.parametrize(
    ("header", "status"),
    [(b"Bearer s3cret\xff", 401), (b"Bearer s3cret\x00", 400), (b"Bearer s3cret\x7f\x01", 400), (b"\xff\xfe", 401)],
)
def test_a_malformed_header_is_refused_without_the_token(file, caplog, header: bytes, status: int) -> None:
    caplog.set_level("DEBUG")
    with serving(("reward", file), token="s3cret") as server:
        answer = raw(
            server,
            b"POST /get_reward HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: " + header + b"\r\n\r\n",
        )
    assert answer.split()[1] == str(status).encode()
    assert b'{"error": ' in answer
    assert b"s3cret" not in answer
    assert "s3cret" not in caplog.text


def raw(server: Served, request: bytes) -> bytes:
    """The answer to bytes that no client library would send."""
    with connected(server) as connection:
        connection.sendall(request)
        return b"".join(iter(lambda: connection.recv(4096), b""))


def connected(server: Served) -> socket.socket:
    parts = urlsplit(server.url)
    return socket.create_connection((parts.hostname, parts.port), timeout=30)


def test_idle_connections_keep_no_client_out(file, tmp_path, monkeypatch) -> None:
    """The oldest one without a request under way gives way; requests under way do not."""
    monkeypatch.setattr(serving_module, "largest_number", lambda: 4)
    with (
        serving(("reward", file)) as server,
        waiting(server, tmp_path / "go") as (slow, wish),
        contextlib.ExitStack() as closing,
    ):
        idle = [closing.enter_context(connected(server)) for _ in range(8)]
        for connection in idle:
            # The server may close the first of them while the last ones connect.
            with contextlib.suppress(ConnectionError):
                connection.sendall(b"POST /get_reward HTTP/1.1\r\nHost: x\r\nContent-")
        assert server.ask(["2"]).json()["rewards"] == [2.0]
        assert received(idle[0]) == b"", "closed"
        wish.touch()
        assert slow.result().json()["rewards"] == [7.0]


def test_a_connection_that_sends_no_request_is_closed(file, monkeypatch) -> None:
    monkeypatch.setattr(serving_module, "IDLE", 0.1)
    with serving(("reward", file)) as server:
        assert raw_idle(server, b"") == raw_idle(server, b"GET /health HTTP/1.1\r\nHost: x\r\nX-") == b""


def raw_idle(server: Served, start: bytes) -> bytes:
    """What a client gets that sends no further byte."""
    with connected(server) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(start)
        return received(connection)


def received(connection: socket.socket) -> bytes:
    """The next bytes; none where the server closed the connection.

    A close before the server has read all that came reaches the client as a reset in place of an end.
    """
    try:
        return connection.recv(4096)
    except ConnectionResetError:
        return b""


def test_workers_do_not_inherit_the_token(tmp_path, monkeypatch) -> None:
    file = tmp_path / "worker.py"
    file.write_text("import os\ndef score(prompt, completion, row):\n    return float('RLHF_TOKEN' in os.environ)\n")
    monkeypatch.setenv("RLHF_TOKEN", "s3cret")
    access = Access.checked("127.0.0.1", 0, "RLHF_TOKEN")
    right = {"Authorization": "Bearer s3cret"}
    with serving(("reward", f"file:{file}"), access=access) as server:
        assert server.ask(["1"], headers=right).json()["rewards"] == [0.0]


def test_a_stop_answers_what_is_under_way_and_takes_nothing_new(file, tmp_path) -> None:
    with serving(("reward", file)) as server, waiting(server, tmp_path / "go") as (slow, wish):
        server.stop.request("test")
        while answers(server):
            time.sleep(0.01)
        assert not server.ended.done()
        wish.touch()
        assert slow.result().json()["rewards"] == [7.0]
