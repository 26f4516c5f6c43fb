"""Python functions as tools: schema, arguments, results, deadlines, and the processes they run in."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError
from rlhf.errors import ConfigError, PluginImportFailed, RolloutError
from rlhf_plugin_tools.functions import FunctionSource, PythonFunction
from rlhf_plugin_tools.options import ToolsConfig
from rlhf_plugin_tools.output import Output
from rlhf_plugin_tools.tool import LONGEST_ERROR
from rlhf_plugin_tools.toolbox import Toolbox
from rlhf_plugin_tools.workers import first_request

from tests import orphans

FILE = Path(__file__).parent / "functions_under_test.py"


def address(name: str) -> str:
    return f"file:{FILE}:{name}"


def function(name: str) -> PythonFunction:
    return PythonFunction(FunctionSource.of(address(name)))


def toolbox(*names: str, **options) -> Toolbox:
    config = ToolsConfig(functions=tuple(map(address, names)), **options)
    return Toolbox(config, {source: PythonFunction(source) for source in map(FunctionSource.of, config.functions)})


def calls(*requests: tuple[str, str]) -> list[dict]:
    return [
        {"id": f"c{n}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for n, (name, arguments) in enumerate(requests)
    ]


def answered(*requests: tuple[str, str], offer: tuple[str, ...] = (), **options) -> list[str]:
    """The results of the calls in one answer."""

    async def run() -> list[str]:
        box = toolbox(*(offer or dict.fromkeys(name for name, _ in requests)), **options)
        await box.start()
        try:
            return [message["content"] for message in await box.answer(calls(*requests))]
        finally:
            await box.close()

    return asyncio.run(run())


def test_the_schema_is_made_of_the_signature_and_the_docstring() -> None:
    assert function("add").schema == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.\n\nThe sum is exact.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "description": "the first number"},
                    "b": {"type": "integer", "description": "the second number", "default": 1},
                },
                "required": ["a"],
                "additionalProperties": False,
            },
        },
    }
    parameters = function("norm").schema["function"]["parameters"]
    assert parameters["properties"]["how"] == {"enum": ["l1", "max"], "type": "string", "default": "l1"}
    assert parameters["$defs"]["Point"]["required"] == ["x", "y"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing_here", "the file has no function of this name. It has: add, norm"),
        ("not_a_function", "the file has no function of this name"),
        ("undocumented", "has no docstring"),
        ("untyped", "parameter 'a' has no type hint"),
        ("several", "parameter 'a' cannot be passed by name, but a policy passes every argument by name"),
        ("unusual", "has a type that JSON cannot hold"),
        ("unknown", "type hints cannot be read: NameError: name 'Missing' is not defined"),
    ],
)
def test_a_function_that_cannot_be_a_tool_is_refused(name, message) -> None:
    with pytest.raises(ConfigError, match=message):
        function(name)


def test_references_are_checked(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"'add' is not a function; write 'file:PATH.py:NAME'"):
        FunctionSource.of("add")
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        FunctionSource.of(f"file:{tmp_path}/none.py:add")
    (tmp_path / "broken.py").write_text("1 / 0")
    with pytest.raises(PluginImportFailed, match="ZeroDivisionError"):
        PythonFunction(FunctionSource.of(f"file:{tmp_path}/broken.py:add"))
    with pytest.raises(ValidationError, match="no tools are configured"):
        ToolsConfig()
    with pytest.raises(ValidationError, match="names the same function twice"):
        ToolsConfig(functions=("file:a.py:f", "file:a.py:f"))


def test_calls_of_one_answer_are_answered_in_their_order() -> None:
    async def run() -> list[dict]:
        box = toolbox("add", "norm")
        await box.start()
        try:
            return await box.answer(calls(("add", '{"a": 2}'), ("norm", '{"p": {"x": 3, "y": -4}}')))
        finally:
            await box.close()

    assert asyncio.run(run()) == [
        {"role": "tool", "tool_call_id": "c0", "name": "add", "content": "3"},
        {"role": "tool", "tool_call_id": "c1", "name": "norm", "content": "7.0"},
    ]


WRONG = {
    ("add", '{"a": "2"}'): "Error: invalid arguments for 'add': a: Input should be a valid integer",
    ("add", '{"a": 2.0}'): "Error: invalid arguments for 'add': a: Input should be a valid integer",
    ("add", '{"a": true}'): "Error: invalid arguments for 'add': a: Input should be a valid integer",
    ("add", '{"c": 2}'): "Error: invalid arguments for 'add': a: Field required; c: Extra inputs are not permitted",
    ("add", "[2]"): "Error: invalid arguments for 'add': Input should be an object",
    ("add", '{"a": 2'): "Error: invalid arguments for 'add': Invalid JSON: EOF while parsing",
    ("norm", '{"p": {"x": 1, "y": "2"}}'): "p.y: Input should be a valid integer",
    ("norm", '{"p": {"x": 1, "y": 2}, "scale": 0}'): "scale: Input should be greater than 0",
    ("norm", '{"p": {"x": 1, "y": 2}, "scale": NaN}'): "scale: Input should be a finite number",
    ("ad", "{}"): "Error: there is no tool 'ad'. Tools: add, norm. Did you mean 'add'?",
}


def test_a_call_that_is_wrong_is_told_to_the_policy() -> None:
    for answer, (call, message) in zip(answered(*WRONG, offer=("add", "norm"), parallel=1), WRONG.items(), strict=True):
        assert message in answer, call


def test_the_text_about_a_wrong_call_is_short_whatever_the_call_and_the_number_of_tools(tmp_path) -> None:
    file = tmp_path / "many.py"
    file.write_text("".join(f'def tool_{n}() -> int:\n    """A number."""\n    return {n}\n' for n in range(300)))
    config = ToolsConfig(functions=tuple(f"file:{file}:tool_{n}" for n in range(300)))
    box = Toolbox(config, {s: PythonFunction(s) for s in FunctionSource.of_all(config.functions)})

    async def run() -> list[str]:
        await box.start()
        try:
            wrong = calls(("tool_x", "{}"), ("tool_1", f'{{"{"k" * 5000}": 1}}'))
            return [message["content"] for message in await box.answer(wrong)]
        finally:
            await box.close()

    unknown, invalid = asyncio.run(run())
    assert unknown.startswith("Error: there is no tool 'tool_x'. Tools: tool_0, tool_1, tool_2, ")
    assert ", and more. Did you mean 'tool_" in unknown
    assert invalid.startswith("Error: invalid arguments for 'tool_1': kkk")
    assert max(len(unknown), len(invalid)) <= len("Error: ") + LONGEST_ERROR


RESULTS = {
    "text": "hé",
    "json": '{"a": [1, null, true]}',
    "nothing": "null",
    "long": "x" * 100 + "\n[cut: 100 of 1000 characters]",
    "bytes": "Error: 'give' returned bytes (Object of type bytes is not JSON serializable). A tool may return text, or",
    "nan": "Error: 'give' returned float (Out of range float values are not JSON compliant",
    "keys": "Error: 'give' returned dict (a key is int)",
    "surrogate": "Error: 'give' returned str (",
    "object": "Error: 'give' returned object (",
}


def test_results_are_text_or_json() -> None:
    answers = answered(*(("give", f'{{"what": "{name}"}}') for name in RESULTS), max_result=100, parallel=1)
    for answer, (name, result) in zip(answers, RESULTS.items(), strict=True):
        assert answer.startswith(result) if result.startswith("Error") else answer == result, name


def test_errors_of_functions_are_told_and_the_process_lives_on() -> None:
    requests = [("fail", '{"message": "no such city"}'), ("leave", '{"code": 4}'), ("fork", "{}")]
    pid, *answers, after = answered(("worker", "{}"), *requests, ("worker", "{}"), parallel=1)
    assert answers == [
        "Error: 'fail' raised ValueError: no such city",
        "Error: 'leave' raised SystemExit: 4",
        "child True",
    ]
    assert pid == after != str(os.getpid())


def has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_a_call_over_its_timeout_is_killed_with_what_it_started_and_told(tmp_path) -> None:
    file = tmp_path / "pids"

    async def run() -> list[str]:
        box = toolbox("sleep", "add", timeout=1.0)
        await box.start()
        try:
            first = await box.answer(calls(("sleep", f'{{"file": "{file}"}}')))
            while not all(map(has_ended, map(int, file.read_text().split()))):
                await asyncio.sleep(0.01)
            return [m["content"] for m in [*first, *await box.answer(calls(("add", '{"a": 1}')))]]
        finally:
            await box.close()

    assert asyncio.run(asyncio.wait_for(run(), 60)) == ["Error: 'sleep' took longer than 1 s and was stopped", "2"]


DRIVER = """
import asyncio, sys
from rlhf_plugin_tools.functions import PythonFunction, FunctionSource
from rlhf_plugin_tools.workers import PlainFunction, Workers

async def main():
    source = FunctionSource.of(sys.argv[1])
    workers = Workers([source], 1000)
    await workers.start()
    await PlainFunction(PythonFunction(source), workers).call("{}", 600.0, 1000)

asyncio.run(main())
"""
BUSY = """
import re

def busy() -> int:
    "Compute for ever without releasing the lock of the interpreter."
    {leaving}
    return bool(re.match("(a|a)*b", "a" * 99))
"""


def test_nothing_outlives_a_driver_that_is_killed_in_mid_call(tmp_path) -> None:
    pids = tmp_path / "pids"
    (tmp_path / "busy.py").write_text(BUSY.format(leaving=orphans.leaving(pids)))
    command = [sys.executable, "-c", DRIVER, f"file:{tmp_path / 'busy.py'}:busy"]
    assert orphans.end_with(subprocess.Popen(command), pids)


def test_the_worker_that_was_started_first_takes_the_first_call() -> None:
    """``parallel`` is the maximum number of processes."""

    async def run() -> list[int]:
        box = toolbox("worker", "add", parallel=2)
        await box.start()
        try:
            processes = [len(box._workers._all)]
            for requests in ([("worker", "{}")], [("add", '{"a": 1}')] * 4):
                await box.answer(calls(*requests))
                processes.append(len(box._workers._all))
            return processes
        finally:
            await box.close()

    assert asyncio.run(run()) == [1, 1, 2]


def test_a_worker_that_dies_is_a_failed_sample_and_is_replaced() -> None:
    async def run() -> str:
        box = toolbox("crash", "add")
        await box.start()
        try:
            with pytest.raises(RolloutError, match=r"exited with code 3 during a call of 'crash'.*\n  about to crash"):
                await box.answer(calls(("crash", "{}")))
            [message] = await box.answer(calls(("add", '{"a": 1}')))
            return message["content"]
        finally:
            await box.close()

    assert asyncio.run(run()) == "2"


def test_a_failure_stops_the_other_calls_of_the_answer(tmp_path) -> None:
    file = tmp_path / "pids"
    file.write_text("")

    async def run() -> None:
        box = toolbox("crash", "sleep")
        await box.start()
        try:
            waiting = asyncio.create_task(box.answer(calls(("sleep", f'{{"file": "{file}"}}'), ("crash", "{}"))))
            with pytest.raises(RolloutError):
                await waiting
            while not all(map(has_ended, map(int, file.read_text().split()))):
                await asyncio.sleep(0.01)
        finally:
            await box.close()

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_file_is_read_and_sent_to_a_worker_once_whatever_the_number_of_its_functions() -> None:
    sources = FunctionSource.of_all([address(name) for name in ("add", "sleep", "crash")])
    assert [source.name for source in sources] == ["add", "sleep", "crash"]
    assert {id(source.file) for source in sources} == {id(sources[0].file)}
    assert json.dumps(first_request(sources, 1000)).count("def add(") == 1


def test_a_worker_that_cannot_start_is_a_failed_sample(tmp_path) -> None:
    """The file can be imported here, but not in a worker process."""
    file = tmp_path / "tool.py"
    file.write_text(f'import os\nassert os.getpid() == {os.getpid()}\n\ndef f() -> int:\n    """F."""\n    return 1\n')
    config = ToolsConfig(functions=(f"file:{file}:f",))
    source = FunctionSource.of(config.functions[0])

    async def run() -> None:
        with pytest.raises(RolloutError, match=r"worker process of rollout.functions cannot start.*AssertionError"):
            await Toolbox(config, {source: PythonFunction(source)}).start()

    asyncio.run(run())


def test_async_functions_run_on_the_event_loop_at_once_and_are_cancelled() -> None:
    requests = [("meet", '{"name": "a"}'), ("meet", '{"name": "b"}'), ("wait", "{}"), ("refuse", "{}")]
    assert answered(*requests, timeout=1.0) == [
        "a of ['a', 'b']",
        "b of ['a', 'b']",
        "Error: 'wait' took longer than 1 s and was stopped",
        "Error: 'refuse' raised TimeoutError: the other side is slow",
    ]


def test_functions_of_one_name_are_refused(tmp_path) -> None:
    other = tmp_path / "other.py"
    other.write_text('def add() -> int:\n    """Another."""\n    return 1\n')
    config = ToolsConfig(functions=(address("add"), f"file:{other}:add"))

    async def run() -> None:
        with pytest.raises(ConfigError, match=r"functions_under_test.py:add and .*other.py:add both have a tool 'add'"):
            await Toolbox(config, {s: PythonFunction(s) for s in map(FunctionSource.of, config.functions)}).start()

    asyncio.run(run())


@pytest.mark.linux("the size of a pipe is set")
def test_a_process_that_prints_without_end_leaves_the_event_loop_free() -> None:
    async def check() -> None:
        output = Output()
        fcntl.fcntl(output.stream, fcntl.F_SETPIPE_SZ, 2**20)
        output.stream.write("more\n" * 100_000 + "the end\n")
        output.started()
        await asyncio.sleep(0)
        assert "the end" not in output.tail(), "it is read in parts, and the loop does other work in between"
        for _ in range(20):
            await asyncio.sleep(0)
        assert "the end" in output.tail()
        output.close()

    asyncio.run(check())
