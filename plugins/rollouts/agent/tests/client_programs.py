"""Agents that use other clients as they are. They run in a virtual environment with the packages."""

import contextlib
import operator
import os
from functools import reduce

ASK = "1+2?"


def langchain(task, base_url, api_key):
    from langchain_core.messages import HumanMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    @tool
    def add(a: int, b: int) -> int:
        """Adds two numbers."""
        return a + b

    model = ChatOpenAI(model="policy", base_url=base_url, api_key=api_key).bind_tools([add])
    messages = [HumanMessage(ASK)]
    for number in range(4):
        streamed = number == 1
        answer = reduce(operator.add, model.stream(messages)) if streamed else model.invoke(messages)
        results = [add.invoke(call) for call in answer.tool_calls]
        messages += [answer, *(results or [HumanMessage("Go on.")])]
    return 4


def pydantic_ai(task, base_url, api_key):
    from pydantic_ai import Agent, UsageLimitExceeded, UsageLimits
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    agent = Agent(OpenAIChatModel("policy", provider=OpenAIProvider(base_url=base_url, api_key=api_key)))
    calls = []

    @agent.tool_plain
    def add(a: int, b: int) -> int:
        """Adds two numbers."""
        calls.append((a, b))
        return a + b

    for _ in range(3):
        with contextlib.suppress(UsageLimitExceeded):
            agent.run_sync(ASK, usage_limits=UsageLimits(request_limit=4))
    return float(len(calls))


async def openai_agents(task, base_url, api_key):
    """``/v1/responses``, with a subagent behind a tool."""
    from agents import Agent, MaxTurnsExceeded, Runner, function_tool, set_default_openai_client, set_tracing_disabled
    from openai import AsyncOpenAI

    set_default_openai_client(AsyncOpenAI(base_url=base_url, api_key=api_key))
    set_tracing_disabled(True)
    sub = Agent(name="sub", instructions="Subagent.", model="policy")
    calls = []

    @function_tool
    async def add(a: int, b: int) -> str:
        """Adds two numbers."""
        calls.append((a, b))
        if len(calls) == 1:
            await Runner.run(sub, "Add.", max_turns=1)
        return str(a + b)

    main = Agent(name="main", instructions="Add.", model="policy", tools=[add])
    while not calls:
        with contextlib.suppress(MaxTurnsExceeded):
            await Runner.run(main, ASK, max_turns=4)
    streamed = Runner.run_streamed(main, ASK, max_turns=2)
    with contextlib.suppress(MaxTurnsExceeded):
        async for _ in streamed.stream_events():
            pass
    return float(len(calls))


def smolagents(task, base_url, api_key):
    from smolagents import CodeAgent, OpenAIModel

    agent = CodeAgent(tools=[], model=OpenAIModel("policy", api_base=base_url, api_key=api_key), max_steps=3)
    agent.run(ASK)
    return float(len(agent.memory.steps))


def mini_swe_agent(task, base_url, api_key):
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would look for prices on the web
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.environments.local import LocalEnvironment
    from minisweagent.models.litellm_model import LitellmModel

    model = LitellmModel(
        model_name="openai/policy",
        model_kwargs={"api_base": base_url, "api_key": api_key},
        cost_tracking="ignore_errors",
    )
    agent = DefaultAgent(
        model,
        LocalEnvironment(),
        system_template="Use bash.",
        instance_template="{{ task }}",
        step_limit=3,
        max_consecutive_format_errors=0,
    )
    agent.run(ASK)
    return float(agent.n_calls)
