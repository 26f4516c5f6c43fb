"""Options, bodies of requests, parts of answers, and servers that are refused. Servers are in test_server.py."""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import ClassVar

import pytest
from rlhf.errors import CapabilityError, ConfigError, ModelError, SyncError
from rlhf.interfaces import GeneratorSpec
from rlhf.types import GenerationRequest, Sampling, Turn
from rlhf_engines.requests import NewTokens, OpenRequest
from rlhf_engines.weight_files import PROTOCOL
from rlhf_plugin_sglang.generator import (
    SglangServerGenerator,
    SglangServersConfig,
    body,
    check_support,
    end_tokens,
    unusable,
)
from rlhf_plugin_sglang.server import SglangServer
from rlhf_plugin_sglang.worker import ServedModel

URL = "http://127.0.0.1:30000"
VOCABULARY = 50_000
HELLO = hashlib.sha256(b"hello").hexdigest()
FACTS = {
    "dtype": "bfloat16",
    "formats": ["bfloat16"],
    "length": 256,
    "quantization": None,
    "speculative": False,
    "deterministic": True,
    "incremental": False,
    "shared": False,
    "data_parallel": 1,
    "pipeline_parallel": 1,
}


@pytest.mark.parametrize(
    ("sampling", "parameters", "mask"),
    [
        (Sampling(9), {"top_k": VOCABULARY, "top_p": 1.0, "max_new_tokens": 9, "min_p": 0.0}, False),
        (Sampling(9, top_k=VOCABULARY + 1), {"top_k": VOCABULARY}, False),
        (Sampling(9, 0.7, top_k=5), {"top_k": 5, "temperature": 0.7}, True),
        (Sampling(9, top_p=0.5), {"top_k": VOCABULARY, "top_p": 0.5}, True),
        (Sampling(9, 0.0, top_p=0.5, top_k=5), {"top_k": VOCABULARY, "top_p": 1.0, "temperature": 0.0}, False),
    ],
)
def test_each_request_names_a_finite_top_k_and_asks_for_log_probs_after_truncation(sampling, parameters, mask):
    payload = body(GenerationRequest((3, 4), 7, sampling), (), VOCABULARY, "load")
    assert payload["sampling_params"].items() >= parameters.items()
    assert (payload["input_ids"], payload["return_sampling_mask"], payload["extra_key"]) == ([3, 4], mask, "load")


def test_seeds_of_64_bits_and_end_tokens():
    request = GenerationRequest((3,), 2**64 - 1, Sampling(9, stop_token_ids=(8,)))
    ends = end_tokens(request.sampling, (2, 1))
    parameters = body(request, ends, VOCABULARY, "")["sampling_params"]
    assert (parameters["sampling_seed"], parameters["stop_token_ids"], parameters["ignore_eos"]) == (
        -1,
        [1, 2, 8],
        False,
    )
    assert body(request, (), VOCABULARY, "")["sampling_params"]["ignore_eos"]
    assert end_tokens(Sampling(9, stop_token_ids=(8,), ignore_eos=True), (2, 1)) == {8}


def test_a_truncation_whose_log_probs_the_servers_do_not_report_is_refused():
    for sampling in (Sampling(9), Sampling(9, top_p=0.5, top_k=4096), Sampling(9, 0.0, top_p=0.5)):
        check_support(0, sampling, VOCABULARY, 4096)
    with pytest.raises(ConfigError, match=r"request 3 has top_p = 0.5 and top_k = 0.*--sampling-mask-max-tokens 50000"):
        check_support(3, Sampling(9, top_p=0.5), VOCABULARY, 4096)


def test_an_answer_has_all_tokens_so_far():
    server = SglangServer(URL, {}, {}, 1.0, 1)
    info = {"finish_reason": None, "output_token_logprobs": [[-0.1, 7, None], [-0.2, 8, None], [-0.3, 9, None]]}
    answer = {"output_ids": [7, 8, 9], "meta_info": info}
    assert list(server.new_tokens(answer, 1)) == [NewTokens([8, 9], [-0.2, -0.3], None, None)]
    info |= {"finish_reason": {"type": "length", "length": 3}, "output_token_sampling_logprobs": [-1.0, -2.0, -3.0]}
    [tokens] = server.new_tokens(answer, 2)
    assert (tokens.ids, tokens.logprobs, tokens.finish) == ([9], [-3.0], "length")
    with pytest.raises(ModelError, match="2 output_ids and 3 log-probs"):
        list(server.new_tokens(answer | {"output_ids": [7, 8]}, 0))


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({}, ""),
        ({"deterministic": False}, "Start it with --enable-deterministic-inference"),
        ({"incremental": True}, "Start it without --incremental-streaming-output"),
        ({"pipeline_parallel": 2}, "has 2 stages"),
        ({"shared": True}, "--weight-cache-mode off"),
        ({"dtype": "float16"}, "computes in float16"),
        ({"formats": ["bfloat16", "float32"]}, "differences would round all of them to bfloat16"),
        ({"quantization": "fp8"}, "quantises its weights"),
        ({"speculative": True}, "decodes speculatively"),
        ({"data_parallel": 2}, "has 2 data-parallel engines"),
        ({"length": 255}, r"takes sequences of 255 tokens, but the run needs 256. Start it with --context-length 258"),
    ],
)
def test_a_server_that_cannot_be_used_is_refused(facts, message):
    reason = unusable(FACTS | facts, GeneratorSpec((), str, max_tokens=256), "differences")
    assert message in reason if message else not reason


def test_min_p_and_tokens_that_are_not_there_are_refused_before_the_start():
    spec, config = GeneratorSpec((), str), SglangServersConfig(urls=(URL,), admin_token_env="RLHF_NO_SUCH_TOKEN")
    with pytest.raises(ConfigError, match=r"admin_token_env = 'RLHF_NO_SUCH_TOKEN', but this environment variable"):
        SglangServerGenerator.check(config, spec, [], None)
    with pytest.raises(ConfigError, match=r"min_p is 0.1; generator 'sglang_server' does not support it"):
        SglangServerGenerator.check(SglangServersConfig(urls=(URL,)), spec, [Sampling(9, min_p=0.1)], None)


def test_another_sglang_is_refused_on_its_server(monkeypatch):
    monkeypatch.setitem(sys.modules, "sglang", SimpleNamespace(__version__="0.5.24"))
    with pytest.raises(SyncError, match=r"it runs SGLang 0.5.24; allowed: 0.5.23"):
        ServedModel(None).facts("")


class Handler(BaseHTTPRequestHandler):
    answer: ClassVar[object] = {}

    def do_GET(self) -> None:
        data = self.answer if isinstance(self.answer, bytes) else json.dumps(self.answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.do_GET()

    def log_message(self, *words: object) -> None: ...


@contextmanager
def answering(answer: object) -> Iterator[str]:
    """The address of a server that answers every request so."""
    handler = type("Answer", (Handler,), {"answer": answer})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server, ThreadPoolExecutor(1) as executor:
        executor.submit(server.serve_forever)
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


def test_a_sample_that_a_limit_of_the_server_ended_is_refused():
    info = {"finish_reason": {"type": "length", "length": 2}, "output_token_logprobs": [[-0.1, 7, None]] * 2}
    request = GenerationRequest((3,), 0, Sampling(5))

    async def sample(url: str) -> None:
        server = SglangServer(url, {}, {}, 5.0, 1)
        await server.sample(lambda: OpenRequest(0, request, str, 0, "SGLang"), body(request, (), VOCABULARY, ""))

    with (
        answering({"output_ids": [7, 7], "meta_info": info}) as url,
        pytest.raises(ModelError, match="ended a sample after 2 of at most 5 tokens"),
    ):
        asyncio.run(sample(url))


def test_a_line_separator_in_a_text_does_not_end_an_event():
    info = {"finish_reason": {"type": "length", "length": 1}, "output_token_logprobs": [[-0.5, 7, None]]}
    event = json.dumps({"output_ids": [7], "text": "a\u2028b\x85", "meta_info": info}, ensure_ascii=False)
    request = GenerationRequest((3,), 0, Sampling(1, stop=("z",)))

    async def sample(url: str) -> Turn:
        server = SglangServer(url, {}, {}, 5.0, 1)
        sampling = body(request, (), VOCABULARY, "")
        return await server.sample(lambda: OpenRequest(0, request, str, 0, "SGLang"), sampling)

    with answering(f"data: {event}\n\ndata: [DONE]\n\n".encode()) as url:
        assert [*asyncio.run(sample(url)).ids] == [7]


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({}, "cannot take weights: .*Start it in an environment with the plugin rlhf-plugin-sglang"),
        ({"protocol": PROTOCOL, "digest": "another"}, "sees a different file at .*Set `folder`"),
        ({"protocol": PROTOCOL - 1}, "has a different version of rlhf-plugin-sglang"),
        ({"protocol": PROTOCOL, "digest": HELLO, **FACTS, "length": 5}, "takes sequences of 5 tokens"),
    ],
)
def test_a_server_is_refused_by_what_its_workers_answer(facts, message, monkeypatch):
    monkeypatch.setattr("rlhf_engines.server_generator.secrets.token_hex", lambda: "hello")
    workers = json.dumps([{"value": facts, "error": ""}])
    with answering({"success": bool(facts), "message": workers}) as url, pytest.raises(CapabilityError, match=message):
        SglangServerGenerator(SglangServersConfig(urls=(url,)), GeneratorSpec((), str, max_tokens=256))
