"""The rollout in the runtime, with chat templates that know tools and a generator whose answers are given."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path

import pytest
from rlhf.errors import ConfigError
from rlhf.interfaces import Generator, Proof
from rlhf.types import Row, Sampling, Turn
from rlhf_plugin_tools.options import McpServer, ToolsConfig
from rlhf_plugin_tools.rollout import UNREADABLE, ToolsRollout
from rlhf_runtime.calls.main_thread import MainThread
from rlhf_runtime.config.data_section import DataSection
from rlhf_runtime.data.template import Template
from rlhf_runtime.samples.rollout_settings import RolloutSettings
from rlhf_runtime.samples.rollouts import Rollouts
from rlhf_runtime.samples.sample_context import SampleParts
from rlhf_testing.chat_templates import CHATML, HERMES
from rlhf_testing.tiny import tiny_tokenizer

FILE = Path(__file__).parent / "functions_under_test.py"
FORGETFUL = HERMES.replace("+ m.content }}", "+ (m.content if loop.last else '') }}", 1)
"""It drops the content of an answer once a message follows."""


def addresses(*names: str) -> tuple[str, ...]:
    return tuple(f"file:{FILE}:{name}" for name in names)


def call(name: str, arguments: str = "{}") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


class Says(Generator):
    """The sample's turn number n gets text n. A text without ``<eos>`` is cut at the budget."""

    name = "says"

    def __init__(self, template, *texts):
        self.template, self.texts, self.asked = template, texts, []

    def generate(self, requests):
        for position, request in enumerate(requests):
            text = self.texts[self.template.decode(request.ids).count("assistant\n") - 1]
            ids = self.template.tokens.ids(text)[: request.sampling.max_new_tokens]
            self.asked.append((list(request.ids), request.sampling))
            finish = "stop" if text.endswith("<eos>") and len(ids) == len(self.template.tokens.ids(text)) else "length"
            yield position, Turn(ids, True, [-1.0] * len(ids), ((0, 0),), finish, text=text.removesuffix("<eos>"))

    def load(self, source, version):
        return Proof(version)


class Scorer:
    async def score(self, group, trained_on=True):
        pass


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def template_of(tokenizer, chat_template=HERMES):
    from transformers import AutoTokenizer

    instance = AutoTokenizer.from_pretrained(str(tokenizer))
    instance.chat_template = chat_template
    return Template(instance, DataSection(system="Be brief."))


@pytest.fixture
def template(tokenizer):
    return template_of(tokenizer)


def play(template, config, *texts, samples=1, max_tokens=4000, max_new_tokens=500, columns=None):
    """(trajectories of one group, what the generator was asked)."""
    main = MainThread()
    generator = Says(template, *texts)
    rollouts = Rollouts(SampleParts(ToolsRollout(config), template, Scorer()), generator, main)
    sampling = Sampling(max_new_tokens=max_new_tokens)
    settings = RolloutSettings(sampling, samples, "sample", 0, max_tokens, 60.0, abort_on_failure=False)
    try:
        [group] = rollouts.run([Row(columns or {"prompt": "2+3?"}, "rows", 0)], 0, settings)
    finally:
        main.close()
    return group.trajectories, generator.asked


def config(*names: str, **options) -> ToolsConfig:
    return ToolsConfig(functions=addresses(*names), **options)


def test_the_tokens_are_those_of_the_templates_render(template) -> None:
    texts = ["I add." + "\n" + call("add", '{"a": 2, "b": 3}') + "<eos>", "It is 5.<eos>"]
    [trajectory], requests = play(template, config("add"), *texts)
    assert trajectory.status == "ok", trajectory.error
    assert [(t.sampled, t.fresh) for t in trajectory.turns] == [
        (False, False), (True, False), (False, False), (True, False),
    ]  # fmt: skip
    assert trajectory.answer == "It is 5."
    schema = ToolsRollout(config("add"))._new()._plain[0].schema
    render = template.chat.with_tools([schema]).text(
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "2+3?"},
            {
                "role": "assistant",
                "content": "I add.",
                "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 3}}}],
            },
            {"role": "tool", "content": "5"},
            {"role": "assistant", "content": "It is 5."},
        ],
        answer=False,
    )
    ids = [i for turn in trajectory.turns for i in turn.ids]
    assert template.tokenizer.decode(ids) + "\n" == render
    assert json.dumps(schema["function"]["parameters"]["required"]) in render
    assert requests[1][0] == ids[: -len(trajectory.turns[-1].ids)], "sampled tokens are passed on as they are"


def test_several_calls_of_an_answer_are_executed_and_their_results_are_in_order(template) -> None:
    calls = [
        call("add", '{"a": 1}'),
        call("fail", '{"message": "no"}'),
        call("now"),
        call("later"),
        call("add", '{"a": "1"}'),
    ]
    [trajectory], _ = play(template, config("add", "fail", "now"), "\n".join(calls) + "<eos>", "done<eos>")
    results = trajectory.turns[2].text.split("<tool_response>\n")[1:]
    assert [r.partition("\n</tool_response>")[0] for r in results] == [
        "2",
        "Error: 'fail' raised ValueError: no",
        "noon",
        "Error: there is no tool 'later'. Tools: now, add, fail.",
        "Error: invalid arguments for 'add': a: Input should be a valid integer",
    ]
    assert trajectory.info == {
        "rollout/calls/add": 2.0,
        "rollout/calls/fail": 1.0,
        "rollout/calls/now": 1.0,
        "rollout/calls_unknown": 1.0,
        "rollout/calls_unreadable": 0.0,
        "rollout/no_room": 0.0,
        "rollout/errors/add": 1.0,
        "rollout/errors/fail": 1.0,
        "rollout/errors/now": 0.0,
    }


def refusing(tokenizer, condition: str):
    """A template that refuses messages with this condition."""
    raises = f"{{% if {condition} %}}{{{{ raise_exception('no') }}}}{{% endif %}}"
    return template_of(tokenizer, HERMES.replace("{% for m in messages %}", "{% for m in messages %}" + raises, 1))


def test_the_first_of_several_calls_is_executed_if_the_template_refuses_several(tokenizer) -> None:
    """As those of Llama 3.1 to 3.3. The tokens of the other calls stay."""
    template, text = refusing(tokenizer, "m.tool_calls and m.tool_calls | length > 1"), call("now") + call("now")
    [trajectory], requests = play(template, config("now"), text + "<eos>", "It is noon.<eos>")
    assert trajectory.status == "ok", trajectory.error
    assert trajectory.info["rollout/calls/now"] == 1.0
    assert trajectory.turns[2].messages == (("tool", "noon"),)
    assert text in template.decode(requests[1][0])


@pytest.mark.parametrize("broken", ['{"name": "now", "arguments": {', '{"name": "now"} {"x": 1}', "now()"])
def test_a_call_that_cannot_be_read_is_told(template, broken) -> None:
    text = f"<tool_call>\n{broken}\n</tool_call>" + "<eos>"
    [trajectory], _ = play(template, config("now"), text, "sorry<eos>")
    assert trajectory.status == "ok"
    assert UNREADABLE in trajectory.turns[2].text
    [trajectory], _ = play(template, config("now"), call("now") + text, "sorry<eos>")
    assert "noon" in trajectory.turns[2].text
    assert UNREADABLE in trajectory.turns[2].text
    assert trajectory.info["rollout/calls_unreadable"] == trajectory.info["rollout/calls/now"] == 1.0


REFUSALS = {
    "an id of nine characters, as in Mistral": ("m.tool_call_id is undefined or m.tool_call_id | length != 9", "tool"),
    "a call before it, as in gpt-oss": ("not (messages | selectattr('tool_calls') | list)", "user"),
}


@pytest.mark.parametrize("condition", REFUSALS)
def test_a_call_that_cannot_be_read_is_told_where_the_template_wants(tokenizer, condition) -> None:
    refused, role = REFUSALS[condition]
    template = refusing(tokenizer, f"m.role == 'tool' and ({refused})")
    text = "<tool_call>\n{</tool_call><eos>"
    [trajectory], _ = play(template, config("now"), text, "sorry<eos>")
    assert trajectory.status == "ok", trajectory.error
    assert trajectory.turns[2].messages == ((role, UNREADABLE),)
    [trajectory], _ = play(template, config("now"), call("now") + text, "sorry<eos>")
    assert [role for role, _ in trajectory.turns[2].messages] == ["tool", "tool"]
    assert UNREADABLE in trajectory.turns[2].text


def test_the_last_turn_may_call_and_nothing_is_executed(template, tmp_path) -> None:
    file = tmp_path / "once.py"
    file.write_text(
        f'async def note() -> str:\n    """N."""\n    open("{tmp_path}/note", "a").write("x")\n    return "x"\n'
    )
    options = ToolsConfig(functions=(f"file:{file}:note",), max_turns=2)
    [trajectory], _ = play(template, options, *[call("note") + "<eos>"] * 3)
    assert [t.sampled for t in trajectory.turns] == [False, True, False, True]
    assert (trajectory.status, (tmp_path / "note").read_text()) == ("ok", "x")


def test_an_answer_that_is_cut_off_calls_nothing(template) -> None:
    [trajectory], _ = play(template, config("now"), call("now") + "then much more", max_new_tokens=len(call("now")) + 4)
    assert [t.sampled for t in trajectory.turns] == [False, True]
    assert trajectory.status == "truncated"


def test_results_that_leave_no_room_are_left_out(template) -> None:
    text = call("long") + "<eos>"
    [trajectory], requests = play(template, config("long"), text, "never<eos>")
    room = len(requests[1][0])
    for left, turns, status in ((room, 2, "truncated"), (room + 1, 4, "truncated"), (room + 6, 4, "ok")):
        [trajectory], requests = play(template, config("long"), text, "never<eos>", max_tokens=left)
        assert (len(trajectory.turns), trajectory.status) == (turns, status)
        assert trajectory.turns[-1].sampled
        assert trajectory.info["rollout/no_room"] == float(turns == 2)
    [trajectory], _ = play(template, config("long"), text, max_tokens=50)
    assert "the prompt with the descriptions of the tools leaves no room for an answer" in trajectory.error


def test_a_template_that_rewrites_history_begins_a_new_sequence(tokenizer) -> None:
    template = template_of(tokenizer, FORGETFUL)
    [trajectory], requests = play(template, config("now"), "Let me see." + call("now") + "<eos>", "It is noon.<eos>")
    assert [t.fresh for t in trajectory.turns] == [False, False, True, False]
    assert "Let me see." not in template.decode(requests[1][0])
    assert requests[1][0] == list(trajectory.turns[2].ids)
    limit = len(requests[1][0]) + 20
    [trajectory], _ = play(
        template, config("now"), "Let me see." + call("now") + "<eos>", "Noon.<eos>", max_tokens=limit
    )
    assert trajectory.status == "ok", "the budget counts the tokens of the new sequence only"


def test_a_template_that_ignores_tools_is_refused(tokenizer) -> None:
    [trajectory], _ = play(template_of(tokenizer, CHATML), config("now"), "hi<eos>")
    assert trajectory.status == "failed"
    assert "the chat template does not write the descriptions of tools" in trajectory.error


def test_a_process_that_dies_fails_its_sample_only_and_no_process_is_left(template, tmp_path) -> None:
    file = tmp_path / "tool.py"
    file.write_text(
        "import os\n\ndef once() -> str:\n"
        '    """The first call ends the process."""\n'
        f"    try:\n        os.close(os.open({str(tmp_path / 'lock')!r}, os.O_CREAT | os.O_EXCL))\n"
        "    except FileExistsError:\n        return str(os.getpid())\n"
        "    os._exit(3)\n"
    )
    options = ToolsConfig(functions=(f"file:{file}:once",), parallel=1)
    trajectories, _ = play(template, options, call("once") + "<eos>", "done<eos>", samples=3)
    assert sorted(t.status for t in trajectories) == ["failed", "ok", "ok"]
    [failed] = [t for t in trajectories if t.status == "failed"]
    assert failed.error.startswith("RolloutError: the worker process of rollout.functions exited with code 3 during a")
    pids = {t.turns[2].text.split("\n")[2] for t in trajectories if t.status == "ok"}
    assert len(pids) == 1, "the samples of a run share the worker processes"
    assert not Path(f"/proc/{pids.pop()}").exists()


def test_check_starts_the_tools_before_the_run(tmp_path, caplog) -> None:
    with caplog.at_level(logging.INFO, logger="rlhf_plugin_tools"):
        ToolsRollout(config("now", "add")).check()
    assert caplog.messages == ["rollout 'tools': now, add"]

    async def in_a_notebook() -> None:
        ToolsRollout(config("now")).check()

    asyncio.run(in_a_notebook())
    with pytest.raises(ConfigError, match="the file has no function of this name"):
        ToolsRollout(config("missing")).check()
    servers = {"gone": McpServer(command=("/no/program",))}
    with pytest.raises(ConfigError, match=r"(?s)rollout 'tools': MCP server 'gone' cannot be used: .*No such file"):
        ToolsRollout(ToolsConfig(mcp=servers)).check()
