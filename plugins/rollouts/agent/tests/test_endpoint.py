"""The endpoint: requests that are refused, in the API's form, and those that are answered."""

from __future__ import annotations

import asyncio
import urllib.error
import urllib.request

import pytest
from rlhf.types import Sampling
from rlhf_endpoint.config import ProgramConfig
from rlhf_endpoint.endpoint import ENDED_LIMIT, Endpoint
from rlhf_endpoint.session import Session
from rlhf_testing.chat_templates import CHATML, HERMES

REFUSED = {
    "broken JSON": ("raw=b'{broken'", 400, "invalid_json"),
    "no object": ("raw=b'[1]'", 400, "invalid_json"),
    "11 MB": ("raw=b'x' * (11 * 2**20)", 413, "request_too_large"),
    "another path": ("path='/embeddings'", 404, "unknown_url"),
    "another model": ("model='gpt-4o'", 404, "model_not_found"),
    "n = 64": ("n=64", 400, "invalid_value"),
    "temperature 0": ("temperature=0", 400, "invalid_value"),
    "top_p": ("top_p=0.5", 400, "invalid_value"),
    "a penalty": ("presence_penalty=1", 400, "invalid_value"),
    "a penalty of vLLM": ("repetition_penalty=1.05", 400, "invalid_value"),
    "a bias": ("logit_bias={'5': 1}", 400, "invalid_value"),
    "a forced call": ("tools=[add()], tool_choice='required'", 400, "invalid_value"),
    "a forced call of one tool": (
        "tools=[add()], tool_choice={'type': 'function', 'function': {'name': 'add'}}",
        400,
        "invalid_value",
    ),
    "a forced call of the other API": ("path='/responses', input='x', tool_choice='required'", 400, "invalid_value"),
    "a tool of another form": ("tools=[{'type': 'web_search'}]", 400, "invalid_value"),
    "a tool's parameters of another type": ("tools=[add(parameters='{}')]", 400, "invalid_value"),
    "JSON mode": ("response_format={'type': 'json_object'}", 400, "invalid_value"),
    "a schema, as for vLLM": ("guided_json={'type': 'object'}", 400, "invalid_value"),
    "a pattern, as for SGLang": ("regex='[0-9]+'", 400, "invalid_value"),
    "a least length": ("min_tokens=4", 400, "invalid_value"),
    "an answer without end": ("ignore_eos=True", 400, "invalid_value"),
    "excluded words": ("bad_words=['no']", 400, "invalid_value"),
    "top_logprobs": ("logprobs=True, top_logprobs=3", 400, "invalid_value"),
    "max_tokens 0": ("max_tokens=0", 400, "invalid_value"),
    "a stop of another type": ("stop=3", 400, "invalid_value"),
    "parallel calls of another type": ("parallel_tool_calls='no'", 400, "invalid_value"),
    "no messages": ("messages=[]", 400, "invalid_value"),
    "an unknown role": ("messages=[{'role': 'robot', 'content': 'x'}]", 400, "invalid_messages"),
    "an image": ("messages=[{'role': 'user', 'content': [{'type': 'image_url'}]}]", 400, "invalid_messages"),
    "stream of another type": ("stream='yes'", 400, "invalid_value"),
    "state": ("path='/responses', input='x', previous_response_id='y'", 400, None),
    "an unknown item": ("path='/responses', input=[{'type': 'item_reference'}]", 400, "invalid_value"),
    "calls of another type": (
        "messages=[{'role': 'assistant', 'content': 'x', 'tool_calls': 5}, {'role': 'user', 'content': 'y'}]",
        400,
        "invalid_messages",
    ),
    "a text of another type": ("path='/responses', input='x', text='y'", 400, "invalid_value"),
    "a format of another type": ("path='/responses', input='x', text={'format': 'json'}", 400, "invalid_value"),
    "stream options of another type": ("stream=True, stream_options='usage'", 400, "invalid_value"),
    "too long": ("messages=[{'role': 'user', 'content': 'x' * 3000}]", 400, "context_length_exceeded"),
}


def test_bad_requests_are_errors_of_the_api_and_the_sample_goes_on(lab, program, wire):
    calls = "\n".join(
        f"note(task, {name!r}, *ask(base_url, api_key, {arguments}))" for name, (arguments, *_) in REFUSED.items()
    )
    trajectory = lab.one(program(f"{calls}\nask(base_url, api_key)"), {"wire": wire.path})
    assert trajectory.status != "failed", trajectory.error
    results = {name: (status, answer["error"]["code"]) for name, status, answer in wire()}
    assert results == {name: (status, code) for name, (_, status, code) in REFUSED.items()}
    for name, _, answer in wire():
        assert ("fewer tokens than" in answer["error"]["message"]) == ("forced" in name), "the reason is told"
        assert set(answer["error"]) == {"message", "type", "param", "code"}
        assert answer["error"]["message"]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (CHATML, "does not write the descriptions of tools"),
        (HERMES.replace("<tool_call>", "").replace("</tool_call>", ""), "no call"),  # no tag tells its calls from text
    ],
)
def test_tools_that_the_chat_template_cannot_offer_are_refused(laboratories, program, wire, template, message):
    body = "note(task, *ask(base_url, api_key, tools=[add()]))\nask(base_url, api_key)"
    trajectory = laboratories(template).one(program(body), {"wire": wire.path})
    assert trajectory.status != "failed", trajectory.error
    [(status, answer)] = wire()
    assert status == 400
    assert message in answer["error"]["message"]


def test_errors_of_messages_have_the_form_of_its_api(lab, program, wire):
    body = """
at = {"path": "/messages", "max_tokens": 8}
note(task, *ask(base_url, api_key, **at, tool_choice="auto"))
note(task, *ask(base_url, api_key, **at, model="claude"))
note(task, *ask(base_url, api_key, **at, top_p=0.5))
note(task, *ask(base_url, "", path="/messages"))
note(task, *ask(base_url, "sk-another", **at))
note(task, *ask(base_url, api_key, messages=[{"role": "tool", "content": "x"}], **at))
note(task, *ask(base_url, api_key, path="/messages", raw=b"{"))
note(task, *ask(base_url, api_key, messages=[USER, {"role": "assistant", "content": "It is"}], **at))
note(task, *ask(base_url, api_key, output_config={"effort": "low", "format": {"type": "json_schema"}}, **at))
note(task, *ask(base_url, api_key, output_format={"type": "json_schema"}, **at))
ask(base_url, api_key, output_config={"effort": "low"}, **at)
"""
    trajectory = lab.one(program(body), {"wire": wire.path})
    assert trajectory.status != "failed", trajectory.error
    assert [status for status, _ in wire()] == [400, 404, 400, 401, 401, 400, 400, 400, 400, 400]
    for _, answer in wire():
        assert (answer["type"], set(answer["error"])) == ("error", {"type", "message"})
    kinds = {answer["error"]["type"] for _, answer in wire()}
    assert kinds == {"invalid_request_error", "not_found_error", "authentication_error"}


def test_keys_say_whose_request_it_is(lab, program, wire):
    body = """
from urllib.parse import urlsplit
root = "http://" + urlsplit(base_url).netloc
note(task, "foreign", *ask(base_url, "sk-another"))
note(task, "foreign path", *ask(root + "/another/v1", api_key))
note(task, "no key", *ask(root + "/v1", ""))
note(task, "models", *ask(base_url, "sk-another", path="/models"))
note(task, "by path", *ask(base_url, "", headers={"Authorization": ""}))
note(task, "by key", *ask(root + "/v1", api_key))
"""
    trajectory = lab.one(program(body), {"wire": wire.path})
    assert trajectory.status != "failed", trajectory.error
    statuses = {name: status for name, status, _ in wire()}
    assert statuses.pop("models") in (401, 404, 405)
    assert statuses == {"foreign": 401, "foreign path": 401, "no key": 401, "by path": 200, "by key": 200}
    assert "Bearer" not in str(wire())


def test_a_call_after_the_end_of_its_sample(lab, program, wire, tmp_path):
    body = f"""
import os, time
ask(base_url, api_key)
if task["n"] == 0:
    with open({str(tmp_path / "old")!r}, "w") as file:
        file.write(base_url + " " + api_key + " " + str(os.getpid()))
    os.rename({str(tmp_path / "old")!r}, {str(tmp_path / "key")!r})
else:
    while not os.path.exists({str(tmp_path / "key")!r}): time.sleep(0.01)
    url, key, pid = open({str(tmp_path / "key")!r}).read().split()
    for _ in range(1000):
        status, answer = ask(url, key, model="none")
        if status != 404: break
        time.sleep(0.01)
    note(task, status, answer)
"""
    groups = lab.groups(program(body), [{"n": n, "wire": wire.path} for n in range(2)])
    assert all(t.status != "failed" for g in groups for t in g.trajectories), groups
    [[status, answer]] = wire()
    assert (status, answer["error"]["code"]) == (410, "sample_ended")


def test_keys_of_samples_that_ended_long_ago_are_forgotten():
    """A continuous stream always has a sample under way, so the server never ends."""

    def status(url):
        with pytest.raises(urllib.error.HTTPError) as refusal:
            urllib.request.urlopen(f"{url}/models")
        return refusal.value.code

    async def run():
        endpoint, urls = Endpoint(ProgramConfig()), []
        async with endpoint.serve(Session(None)):
            for _ in range(ENDED_LIMIT + 1):
                async with endpoint.serve(Session(None)) as (url, _):
                    urls.append(url)
            return [await asyncio.to_thread(status, url) for url in urls[:2]]

    assert asyncio.run(run()) == [401, 410]


def test_the_fields_of_a_request(lab, program, wire):
    body = """
note(task, *ask(base_url, api_key, max_tokens=2, logprobs=True, temperature=0.5))
note(task, *ask(base_url, api_key, stop=["is"], n=2, max_completion_tokens=6))
"""
    trajectory = lab.one(program(body), {"wire": wire.path})
    assert trajectory.status != "failed", trajectory.error
    (_, first), (_, second) = wire()
    sampled = [t for t in trajectory.turns if t.sampled]
    assert [t.temperature for t in sampled] == [0.5, 1.0, 1.0]
    tokens = first["choices"][0]["logprobs"]["content"]
    assert [f"token_id:{i}" for i in sampled[0].ids] == [t["token"] for t in tokens]
    assert list(sampled[0].logprobs) == [t["logprob"] for t in tokens]
    assert len(sampled[0].ids) <= 2
    assert [c["index"] for c in second["choices"]] == [0, 1]
    assert second["usage"]["completion_tokens"] == len(sampled[1].ids) + len(sampled[2].ids)
    assert all("is" not in (c["message"]["content"] or "") for c in second["choices"])
    assert len(lab.text(trajectory)) == 3, "three answers to one prompt"


def test_the_run_may_decide_how_is_sampled(lab, program):
    trajectory = lab.one(program("ask(base_url, api_key, temperature=0, top_p=0.1)", sampling="run"))
    assert [t.temperature for t in trajectory.turns if t.sampled] == [1.0]


@pytest.mark.parametrize(
    "settings",
    [{"purpose": "eval", "sampling": Sampling(12, 0.0)}, {"greedy": True}],
    ids=["evaluation", "greedy answer"],
)
def test_a_request_with_the_runs_top_p_is_answered_where_nothing_is_trained_on(lab, program, wire, settings):
    # The laboratory compares log-probs with those over all tokens.
    run = {"sampling": Sampling(12, top_p=0.9999999), **settings}
    body = "note(task, ask(base_url, api_key, temperature=0.7, top_p=0.9999999)[0])"
    [group] = lab.groups(program(body), [{"wire": wire.path}], **run)
    assert {line[0] for line in wire()} == {200}
    if "purpose" in run:
        [turn] = [t for t in group.trajectories[0].turns if t.sampled]
        assert turn.temperature == 0.7


def test_wrong_values_where_nothing_is_trained_on_are_refused_as_such(lab, program, wire):
    body = """
for field in ({"top_k": 2.5}, {"top_k": 1e400}, {"top_p": 10**400}, {"min_p": "x"}, {"top_p": 2}, {"temperature": -1}):
    status, answer = ask(base_url, api_key, **field)[:2]
    note(task, status, "training" in str(answer))
note(task, ask(base_url, api_key, top_k=0.0)[0], False)
"""
    lab.one(program(body), {"wire": wire.path}, purpose="eval")
    assert wire() == [[400, False]] * 6 + [[200, False]]


def test_a_repeated_request_gets_the_answer_that_it_got(lab, program, wire):
    body = """
first = ask(base_url, api_key)
note(task, first == ask(base_url, api_key, headers={"x-stainless-retry-count": "1"}))
note(task, first == ask(base_url, api_key))
keyed = ask(base_url, api_key, headers={"Idempotency-Key": "a"})
note(task, keyed == ask(base_url, api_key, headers={"Idempotency-Key": "a"}))
"""
    trajectory = lab.one(program(body), {"wire": wire.path})
    assert trajectory.status != "failed", trajectory.error
    assert wire() == [[True], [False], [True]]
    assert sum(t.sampled for t in trajectory.turns) == 3


def test_a_client_that_goes_away_finds_its_answer_when_it_comes_back(lab, program, wire):
    body = """
import socket
from urllib.parse import urlsplit
raw = json.dumps({"model": "policy", "messages": [USER], "stream": STREAM}).encode()
at = urlsplit(base_url)
with socket.create_connection((at.hostname, at.port)) as s:
    head = f"POST {at.path}/chat/completions HTTP/1.1\\r\\nHost: x\\r\\nContent-Length: {len(raw)}\\r\\n\\r\\n"
    s.sendall(head.encode() + raw)
again = json.dumps({"model": "policy", "messages": [USER], "stream": False}).encode()
if not STREAM:
    note(task, *ask(base_url, api_key, raw=raw, headers={"x-stainless-retry-count": "1"}))
else:
    note(task, *ask(base_url, api_key, raw=again))
"""
    for stream, answers in ((False, 1), (True, 2)):
        trajectory = lab.one(program(f"STREAM = {stream}\n{body}"), {"wire": wire.path})
        assert trajectory.status != "failed", trajectory.error
        assert wire()[-1][0] == 200
        assert sum(t.sampled for t in trajectory.turns) == answers


def test_a_program_that_fails_for_want_of_room_was_cut_off(lab, program):
    body = """
messages = [USER]
while True:
    status, answer = ask(base_url, api_key, messages)
    if status != 200: raise RuntimeError(answer)
    messages += [answer["choices"][0]["message"], {"role": "user", "content": "x" * 100}]
"""
    trajectory = lab.one(program(body), max_tokens=400)
    assert (trajectory.status, trajectory.error) == ("truncated", "")
    assert trajectory.turns[-1].finish == "length"
    assert sum(len(t.ids) for t in trajectory.turns) <= 400
    failed = lab.one(program(body, returns_reward=True), max_tokens=400)
    assert failed.status == "failed"
    assert "context_length_exceeded" in failed.error


@pytest.mark.parametrize("purpose", ["sample", "eval"])
def test_an_error_of_the_run_ends_the_sample_and_is_its_cause(lab, program, purpose, monkeypatch):
    from rlhf.errors import WorkerError

    def broken(requests):
        raise WorkerError("the engine is gone")

    monkeypatch.setattr(lab.generator, "generate", broken)
    with pytest.raises(WorkerError, match="the engine is gone"):
        lab.one(program("import time\nask(base_url, api_key)\ntime.sleep(600)"), purpose=purpose)


def test_a_client_that_goes_away_leaves_no_error_in_the_log(lab, program, caplog):
    body = """
import http.client, json, urllib.parse
address = urllib.parse.urlsplit(base_url)
request_body = {"model": "policy", "messages": [{"role": "user", "content": "x"}], "stream": True}
connection, head = http.client.HTTPConnection(address.netloc), {"Authorization": f"Bearer {api_key}"}
connection.request("POST", f"{address.path}/chat/completions", json.dumps(request_body), head)
connection.close()
ask(base_url, api_key, [{"role": "user", "content": "y"}])
"""
    trajectory = lab.one(program(body))
    assert sum(t.sampled for t in trajectory.turns) == 2, trajectory.error
    assert not [r for r in caplog.records if r.name.startswith("aiohttp")]
