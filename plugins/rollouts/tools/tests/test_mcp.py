"""MCP servers as sources of tools: real servers over standard input and output, and over HTTP."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest
import uvicorn
from aiohttp import web
from pydantic import ValidationError
from rlhf.errors import ConfigError, RolloutError
from rlhf_plugin_tools import mcp_server
from rlhf_plugin_tools.functions import FunctionSource, PythonFunction
from rlhf_plugin_tools.options import McpServer, ToolsConfig
from rlhf_plugin_tools.toolbox import Toolbox
from server_under_test import FROZEN
from server_under_test import server as server_under_test

from tests import orphans

FILE = Path(__file__).parent / "server_under_test.py"


def stdio(mode: str, *arguments: str, **options) -> McpServer:
    return McpServer(command=(sys.executable, str(FILE), mode, *arguments), **options)


@contextmanager
def over_http(mode: str):
    """(address, function that stops the server) of a server in a thread of this process, which starts faster."""
    server = uvicorn.Server(
        uvicorn.Config(server_under_test(mode).streamable_http_app(), port=0, log_level="critical", lifespan="on")
    )
    thread = threading.Thread(target=server.run, daemon=True)

    def stop() -> None:
        FROZEN.set()
        server.should_exit = server.force_exit = True
        thread.join()

    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/mcp", stop
    finally:
        stop()


@asynccontextmanager
async def opened(functions: tuple[str, ...] = (), timeout: float = 30.0, **servers: McpServer):
    config = ToolsConfig(functions=functions, mcp=servers, timeout=timeout, max_result=50)
    box = Toolbox(config, {s: PythonFunction(s) for s in map(FunctionSource.of, functions)})
    await box.start()
    try:
        yield box
    finally:
        await box.close()


async def ask(box: Toolbox, name: str, arguments: str = "{}") -> str:
    call = {"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}}
    [message] = await box.answer([call])
    return message["content"]


def run(coroutine) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 120))


def test_tools_of_a_server_are_listed_called_and_their_arguments_checked() -> None:
    async def check(url: str) -> None:
        async with opened(one=stdio("good"), two=McpServer(url=url, tools=("fail",))) as box:
            assert list(box.tools) == ["double", "structured", "fail"]
            assert box.schemas[0] == {
                "type": "function",
                "function": {
                    "name": "double",
                    "description": "Tool double.",
                    "parameters": {
                        "type": "object",
                        "properties": {"n": {"type": "integer"}},
                        "required": ["n"],
                        "additionalProperties": False,
                    },
                },
            }
            assert await ask(box, "double", '{"n": 21}') == "42"
            assert await ask(box, "structured") == '{"n": 3}'
            assert await ask(box, "double", f'{{"n": {10**60}}}') == "2" + "0" * 49 + "\n[cut: 50 of 61 characters]"
            for arguments, expected in {
                '{"n": "21"}': "Error: invalid arguments for 'double': n: '21' is not of type 'integer'",
                '{"m": 1, "n": 1}': "Error: invalid arguments for 'double': Additional properties are not allowed",
                "{}": "Error: invalid arguments for 'double': 'n' is a required property",
                "[1]": "Error: invalid arguments for 'double': [1] is not of type 'object'",
                '{"n": 1': "Error: invalid arguments for 'double': not JSON: Expecting",
                '{"n": NaN}': "Error: invalid arguments for 'double': not JSON: NaN is not JSON",
            }.items():
                assert (await ask(box, "double", arguments)).startswith(expected)

    with over_http("bad") as (url, _):
        run(check(url))


def test_what_a_server_does_wrong_is_told() -> None:
    async def check(url: str) -> None:
        async with opened(one=McpServer(url=url), timeout=1.0) as box:
            assert await ask(box, "fail") == "Error: no such city"
            assert await ask(box, "silent") == "Error: 'silent' failed and does not say why"
            assert (await ask(box, "refuse")).startswith("Error: 'refuse': ")
            answer = await ask(box, "picture")
            assert answer == "Error: 'picture' returned content of type 'image'; only text can be shown to you"
            lie = "Error: MCP server 'one' breaks its own declaration of "
            assert (await ask(box, "lie")).startswith(lie + "'lie': Invalid structured content")
            assert (await ask(box, "omit")).startswith(lie + "'omit': Tool omit has an output schema but did not")
            assert await ask(box, "slow") == "Error: 'slow' took longer than 1 s and was stopped"
            with pytest.raises(RolloutError, match="input schema of 'far' that refers to something outside it"):
                await ask(box, "far", '{"n": 1}')

    with over_http("bad") as (url, _):
        run(check(url))


@pytest.mark.parametrize("value", [r'"\ud83d"', "[" * 300 + "]" * 300])
def test_arguments_that_cannot_be_sent_leave_the_server_alive(value: str) -> None:
    async def check() -> None:
        async with opened(one=stdio("bad"), timeout=60.0) as box:
            slow = asyncio.create_task(ask(box, "slow"))
            await asyncio.sleep(0)
            answer = await ask(box, "secret", f'{{"n": {value}}}')
            assert answer.startswith("Error: invalid arguments for 'secret': they cannot be sent: Error serializing")
            assert await ask(box, "secret") == "none"
            assert not slow.done()
            slow.cancel()

    run(check())


def test_a_server_that_freezes_fails_the_sample(monkeypatch) -> None:
    monkeypatch.setattr(mcp_server, "ALIVE_DEADLINE", 0.5)
    monkeypatch.setattr(mcp_server, "CLOSE_DEADLINE", 0.2)
    FROZEN.clear()

    async def check(url: str) -> None:
        async with opened(one=McpServer(url=url), timeout=1.0) as box:
            with pytest.raises(RolloutError, match="did not answer a call of 'freeze' in 1 s, and nothing else after"):
                await ask(box, "freeze")

    with over_http("bad") as (url, _):
        run(check(url))


def test_a_server_that_dies_fails_the_sample_and_is_started_again(monkeypatch) -> None:
    monkeypatch.setenv("TOOL_KEY", "k3y")

    async def check() -> None:
        async with opened(one=stdio("bad", env=("TOOL_KEY",))) as box:
            died = r"MCP server 'one' closed its connection during a call of 'die'. Its last output:(.|\n)*about to die"
            with pytest.raises(RolloutError, match=died):
                await ask(box, "die")
            assert await ask(box, "secret") == "k3y"

    run(check())


def test_a_server_that_dies_fails_all_calls_under_way_and_must_not_change(tmp_path) -> None:
    async def check() -> None:
        async with opened(one=stdio("changing", str(tmp_path))) as box:
            results = await asyncio.gather(*(ask(box, "die") for _ in range(4)), return_exceptions=True)
            assert {type(result) for result in results} == {RolloutError}
            with pytest.raises(RolloutError, match="was started again and now lists other tools than before"):
                await ask(box, "tool0")
        assert len(list(tmp_path.iterdir())) == 2

    run(check())


@pytest.mark.parametrize(
    ("mode", "options", "message"),
    [
        ("input", {}, r"input schema of 'broken' that is not a JSON schema: \$.properties.n.type: 'integr'"),
        ("output", {}, "output schema of 'broken' that is not a JSON schema"),
        ("good", {"tools": ("triple",)}, "tools names triple; the server has double, structured"),
        ("good", {"functions": True}, "mine.py:double and MCP server 'one' both have a tool 'double'"),
    ],
)
def test_tools_that_cannot_be_offered_are_refused(mode, options, message, tmp_path) -> None:
    file = tmp_path / "mine.py"
    file.write_text('async def double(n: int) -> int:\n    """Double."""\n    return 2 * n\n')

    async def check(url: str) -> None:
        functions = (f"file:{file}:double",) if options.pop("functions", False) else ()
        with pytest.raises(ConfigError, match=message):
            async with opened(functions, one=McpServer(url=url, **options)):
                pass

    with over_http(mode) as (url, _):
        run(check(url))


@pytest.mark.parametrize(
    ("server", "error", "message"),
    [
        (stdio("good", env=("NOT_SET_HERE",)), ConfigError, "env names NOT_SET_HERE, which is not set"),
        (stdio("none"), RolloutError, r"cannot be used: MCPError: Connection closed. Its last output:(.|\n)*KeyError"),
        (
            McpServer(command=("/no/program",)),
            RolloutError,
            r"last output:\n  '/no/program' cannot be started",
        ),
        (McpServer(command=("sleep", "600")), RolloutError, "did not list its tools in 5 s"),
        (McpServer(url="http://127.0.0.1:9/mcp"), RolloutError, "cannot be used: "),
    ],
    ids=["env", "exits", "no program", "no answer", "no listener"],
)
def test_a_server_that_cannot_be_used_is_a_failed_sample(server, error, message, monkeypatch) -> None:
    if server.command[:1] == ("sleep",):
        monkeypatch.setattr(mcp_server, "START_DEADLINE", 0.5)
        message = message.replace("5 s", "0.5 s")

    async def check() -> None:
        with pytest.raises(error, match=message):
            async with opened(one=server):
                pass

    run(check())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "set either command or url"),
        ({"command": ("x",), "url": "http://x"}, "set either command or url"),
        ({"url": "ftp://x"}, "must begin with http"),
        ({"url": "http://x", "env": ("A",)}, "env is for a server that the run starts"),
    ],
)
def test_options_are_checked(options, message) -> None:
    with pytest.raises(ValidationError, match=message):
        McpServer(**options)


def test_a_server_over_http_that_stops_fails_the_sample() -> None:
    async def check(url: str, stop) -> None:
        async with opened(one=McpServer(url=url)) as box:
            assert await ask(box, "double", '{"n": 4}') == "8"
            await asyncio.to_thread(stop)
            with pytest.raises(RolloutError, match="MCP server 'one' "):
                await ask(box, "double", '{"n": 4}')

    with over_http("good") as (url, stop):
        run(check(url, stop))


def test_a_server_that_forgot_its_session_or_is_away_behind_a_proxy_fails_the_sample_and_is_used_again() -> None:
    """A server of an older protocol that is started again, and a proxy that has no server."""
    sessions, statuses = [], []

    async def post(request: web.Request) -> web.Response:
        message, session = await request.json(), request.headers.get("mcp-session-id")
        results = {
            "initialize": {
                "protocolVersion": "2025-06-18",
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "older", "version": "1"},
            },
            "tools/list": {"tools": [{"name": "greet", "inputSchema": {"type": "object"}}]},
            "tools/call": {"content": [{"type": "text", "text": "hello"}]},
        }
        if statuses:
            return web.Response(status=statuses[0])
        if message["method"] == "initialize":
            sessions.append(f"session{len(sessions)}")
        elif session not in (None, sessions[-1] if sessions else None):
            return web.Response(status=404)
        if "id" not in message:
            return web.Response(status=202)
        reply = {"jsonrpc": "2.0", "id": message["id"]}
        if message["method"] not in results:
            return web.json_response(reply | {"error": {"code": -32601, "message": "Method not found"}})
        headers = {"mcp-session-id": sessions[-1]} if message["method"] == "initialize" else {}
        return web.json_response(reply | {"result": results[message["method"]]}, headers=headers)

    async def check() -> None:
        app = web.Application()
        app.router.add_post("/mcp", post)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        async with opened(one=McpServer(url=f"http://127.0.0.1:{runner.addresses[0][1]}/mcp")) as box:
            assert await ask(box, "greet") == "hello"
            sessions.append("another")
            with pytest.raises(RolloutError, match=r"'one' stopped answering \(Session terminated\) during a call of"):
                await ask(box, "greet")
            assert await ask(box, "greet") == "hello"
            statuses.append(502)
            for message in ("stopped answering", "cannot be used"):
                with pytest.raises(RolloutError, match=f"MCP server 'one' {message}"):
                    await ask(box, "greet")
            statuses.clear()
            assert await ask(box, "greet") == "hello"
        await runner.cleanup()

    run(check())


LEAVING = """
import runpy, sys
{leaving}
sys.argv[:] = [{file!r}, "bad"]
runpy.run_path({file!r}, run_name="__main__")
"""
DRIVER = """
import asyncio, sys
from rlhf_plugin_tools.mcp_server import Server
from rlhf_plugin_tools.options import McpServer
server = Server("leaving", McpServer(command=(sys.executable, "-c", sys.argv[1])))
asyncio.run(server.call("slow", {}, 600.0))
"""
LINUX = pytest.mark.linux("elsewhere no supervisor ends the server")


@LINUX
def test_what_a_server_started_ends_with_it(tmp_path) -> None:
    pids = tmp_path / "pids"
    text = LEAVING.format(leaving=orphans.leaving(pids), file=str(FILE))

    async def check() -> None:
        async with opened(one=McpServer(command=(sys.executable, "-c", text), tools=("slow",))):
            assert orphans.left(pids)[0].is_running()

    run(check())
    assert orphans.end(orphans.left(pids))


@LINUX
def test_nothing_outlives_a_driver_that_is_killed_in_mid_call(tmp_path) -> None:
    pids = tmp_path / "pids"
    text = LEAVING.format(leaving=orphans.leaving(pids), file=str(FILE))
    assert orphans.end_with(subprocess.Popen([sys.executable, "-c", DRIVER, text]), pids)
