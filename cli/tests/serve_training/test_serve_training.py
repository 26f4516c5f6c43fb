"""`rlhf serve-training` with the client of Tinker, against plain torch with PEFT."""

from __future__ import annotations

import json
import math
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from rlhf.errors import ConfigError
from rlhf.plugins import Plugins
from rlhf_cli.serve_reward.access import Access
from rlhf_runtime.config.load import load
from rlhf_runtime.jobs.training import place_policy
from rlhf_runtime.loop.signals import StopRequest
from rlhf_testing.tiny import tiny_model
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

tinker = pytest.importorskip("tinker")
from rlhf_cli.serve_training.serving import export, serve  # noqa: E402
from tinker import types  # noqa: E402

LORA = (("trainer.lora.rank", "4"), ("trainer.lora.alpha", "32"))
ADAM = types.AdamParams(learning_rate=3e-3, beta1=0.8, beta2=0.9, eps=1e-4, weight_decay=0.1, grad_clip_norm=0.5)
TOLERANCE = 1e-4
"""Of log-probs in fp32: sums are in another order than in the plain statement, and Adam magnifies the difference."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "base")


@contextmanager
def serving(model: Path, folder: Path, *flags: tuple[str, str], token: str | None = None) -> Iterator[str]:
    """The address of a server of ``model``."""
    options = [("policy.model", str(model)), ("data.max_tokens", "64"), ("policy.dtype", "fp32"), *LORA, *flags]
    policy = place_policy(load(None, options, algorithm="serve_training"), Plugins.discover())
    ready: Future[str] = Future()
    stop = StopRequest()

    def run() -> None:
        try:
            serve(policy, Access("127.0.0.1", 0, token), "tiny", folder, announce=ready.set_result, stop=stop)
        except BaseException as error:
            if not ready.done():
                ready.set_exception(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield ready.result(60).split()[2]
    finally:
        stop.request("the end of the test")
        thread.join(30)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("served")


@pytest.fixture(scope="module")
def url(model: Path, folder: Path) -> Iterator[str]:
    with serving(model, folder, ("policy.micro_tokens", "24")) as address:
        yield address


@pytest.fixture(autouse=True)
def client_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-any")
    monkeypatch.setenv("TINKER_TELEMETRY", "0")


@contextmanager
def connected(address: str) -> Iterator[Any]:
    """A client that is closed at the end: its thread would go on asking for a server that has ended."""
    service = tinker.ServiceClient(base_url=address)
    try:
        yield service
    finally:
        service.close("success").result()


@pytest.fixture
def service(url: str) -> Iterator[Any]:
    with connected(url) as client:
        yield client


def trained(service: Any) -> Any:
    return service.create_lora_training_client(base_model="tiny", rank=4).result()


def datum(seed: int, loss: str, targets: int = 1) -> Any:
    """Random tokens and inputs of a loss; every third position has no weight or advantage."""
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, 90, (9 + seed % 5,), generator=random)
    n = len(ids) - 1
    shape = (n,) if targets == 1 else (n, targets)
    following = ids[1:] if targets == 1 else torch.randint(4, 90, shape, generator=random)
    factor = torch.randn(shape, generator=random)
    factor[::3] = 0
    inputs = {"target_tokens": following}
    if loss == "cross_entropy":
        inputs["weights"] = factor
    else:
        inputs |= {"advantages": factor, "logprobs": -4.5 + 0.3 * torch.randn(shape, generator=random)}
    return types.Datum(model_input=types.ModelInput.from_ints(ids[:-1].tolist()), loss_fn_inputs=inputs)


class Plain:
    """The same in torch with PEFT: one sequence at a time, AdamW of torch, the formulas of the protocol."""

    def __init__(self, model: Path, state: Path) -> None:
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(r=4, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
        self.model = get_peft_model(AutoModelForCausalLM.from_pretrained(model), config)
        tensors = load_file(state / "model.safetensors")
        parameters = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        assert len(parameters) == len(tensors) > 0
        for name, p in parameters.items():
            suffix = name.removeprefix("base_model.model.")
            p.data.copy_(next(t for key, t in tensors.items() if key.endswith(suffix)))
        self.parameters = list(parameters.values())
        self.optimizer = torch.optim.AdamW(self.parameters)

    def logprobs(self, each: Any) -> Tensor:
        logits = self.model(torch.tensor([each.model_input.to_ints()])).logits[0].log_softmax(-1)
        targets = each.loss_fn_inputs["target_tokens"].to_torch()
        return logits.gather(1, targets.reshape(len(targets), -1)).reshape(targets.shape)

    def loss(self, each: Any, loss: str, config: dict[str, float]) -> Tensor:
        logp = self.logprobs(each)
        inputs = {name: value.to_torch() for name, value in each.loss_fn_inputs.items()}
        if loss == "cross_entropy":
            return -(logp * inputs["weights"]).sum()
        advantages, old = inputs["advantages"], inputs["logprobs"]
        ratio = torch.exp(logp - old)
        if loss == "dro":
            return -(logp * advantages - 0.5 * config["beta"] * (logp - old) ** 2).sum()
        if loss == "importance_sampling":
            return -(ratio * advantages).sum()
        clipped = ratio.clamp(config["clip_low_threshold"], config["clip_high_threshold"])
        if loss == "ppo":
            return -torch.minimum(ratio * advantages, clipped * advantages).sum()
        return -(clipped.detach() * logp * advantages).sum()

    def step(self, adam: Any) -> float:
        clip = adam.grad_clip_norm or math.inf
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, clip))
        for group in self.optimizer.param_groups:
            group |= {"lr": adam.learning_rate, "betas": (adam.beta1, adam.beta2), "eps": adam.eps}
            group["weight_decay"] = adam.weight_decay
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm


def state_of(folder: Path, path: str) -> Path:
    name, kind, label = path.removeprefix("tinker://").split("/")
    return folder / name.replace(":", "_") / kind / label


CASES: Sequence[tuple[str, dict[str, float], int]] = [
    ("cross_entropy", {}, 1),
    ("cross_entropy", {}, 3),
    ("importance_sampling", {}, 1),
    ("ppo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}, 1),
    ("cispo", {"clip_low_threshold": 0.5, "clip_high_threshold": 1.2}, 1),
    ("dro", {"beta": 0.3}, 1),
]


@pytest.mark.parametrize(("loss", "config", "targets"), CASES, ids=[f"{loss}-{k}" for loss, _, k in CASES])
def test_two_steps_are_those_of_plain_torch(model, folder, service, loss, config, targets) -> None:
    """Each step follows the sum over two requests; between them another model learns."""
    client, other = trained(service), trained(service)
    plain = Plain(model, state_of(folder, client.save_state("begin").result().path))
    for step in range(2):
        for request in range(2):
            data = [datum(10 * step + 5 * request + k, loss, targets) for k in range(3)]
            result = client.forward_backward(data, loss, config).result()
            expected = [plain.loss(item, loss, config) for item in data]
            sum(expected).backward()
            assert result.metrics["loss:sum"] == pytest.approx(float(sum(expected)), rel=1e-4, abs=1e-4)
            for output, item in zip(result.loss_fn_outputs, data, strict=True):
                logprobs = plain.logprobs(item).detach()
                torch.testing.assert_close(output["logprobs"].to_torch(), logprobs, atol=TOLERANCE, rtol=0)
            if loss == "cross_entropy":
                other.forward_backward(data, loss, config).result()
                other.optim_step(ADAM).result()
        metrics = client.optim_step(ADAM).result().metrics
        assert metrics["grad_norm"] == pytest.approx(plain.step(ADAM), rel=1e-4)


def greedy(client: Any, prompt: Sequence[int], **options: Any) -> Any:
    params = types.SamplingParams(max_tokens=6, temperature=0)
    return client.sample(types.ModelInput.from_ints(list(prompt)), 1, params, **options).result()


def test_a_sampling_client_keeps_its_weights_and_the_base_stays(model, service) -> None:
    client, prompt = trained(service), [20, 30, 40]
    data = [datum(k, "cross_entropy") for k in range(4)]

    def learn() -> None:
        client.forward_backward(data, "cross_entropy")
        client.optim_step(types.AdamParams(learning_rate=3e-2)).result()

    learn()
    first = client.save_weights_and_get_sampling_client().result()
    reference = greedy(first, prompt, include_prompt_logprobs=True)
    learn()
    second = client.save_weights_and_get_sampling_client().result()
    base = service.create_sampling_client(base_model="tiny").result()
    repeat = greedy(first, prompt, include_prompt_logprobs=True)
    newer, of_base = (greedy(c, prompt, include_prompt_logprobs=True) for c in (second, base))
    assert repeat.prompt_logprobs == reference.prompt_logprobs
    assert repeat.sequences[0].tokens == reference.sequences[0].tokens
    logits = AutoModelForCausalLM.from_pretrained(model)(torch.tensor([prompt])).logits[0].log_softmax(-1)
    plain = [float(logits[i, token]) for i, token in enumerate(prompt[1:])]
    assert of_base.prompt_logprobs[0] is None
    assert of_base.prompt_logprobs[1:] == pytest.approx(plain, abs=TOLERANCE)
    for other in (newer, of_base):
        assert other.prompt_logprobs[1:] != pytest.approx(reference.prompt_logprobs[1:], abs=1e-3)
    # The log-prob of a token that was drawn is that of a prompt with it.
    token, logprob = newer.sequences[0].tokens[0], newer.sequences[0].logprobs[0]
    scored = second.compute_logprobs(types.ModelInput.from_ints([*prompt, token])).result()
    assert scored[-1] == pytest.approx(logprob, abs=TOLERANCE)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.cluster
def test_the_base_stays_with_an_engine(tmp_path) -> None:
    """The engine has a copy of the weights, with the adapters of the model that was sampled last."""
    pytest.importorskip("vllm")
    model, prompt = tiny_model(tmp_path / "model", head_dim=32), [20, 30, 40]
    engine = ("generator.use", "vllm"), ("generator.kv_cache_gib", "0.0625"), ("generator.max_sequences", "8")
    with serving(model, tmp_path / "served", *engine) as address, connected(address) as service:
        client, base = trained(service), service.create_sampling_client(base_model="tiny").result()
        client.forward_backward([datum(k, "cross_entropy") for k in range(4)], "cross_entropy")
        client.optim_step(types.AdamParams(learning_rate=3e-2)).result()
        sampler = client.save_weights_and_get_sampling_client().result()
        of_model, of_base, repeat = (greedy(c, prompt, include_prompt_logprobs=True) for c in (sampler, base, sampler))
        assert repeat.sequences[0].logprobs == of_model.sequences[0].logprobs
        tokens = of_base.sequences[0].tokens
        logits = AutoModelForCausalLM.from_pretrained(model)(torch.tensor([[*prompt, *tokens]])).logits[0]
        plain = logits.log_softmax(-1)[2:-1].gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()
        assert of_base.sequences[0].logprobs == pytest.approx(plain, abs=TOLERANCE)
        assert of_base.prompt_logprobs[1:] != pytest.approx(of_model.prompt_logprobs[1:], abs=1e-3)


def test_weights_without_a_name_are_kept_for_the_last_eight_sampling_clients(service) -> None:
    client, prompt = trained(service), [20, 30]
    samplers = [client.save_weights_and_get_sampling_client().result() for _ in range(9)]
    with pytest.raises(tinker.TinkerError, match="a model's unnamed checkpoints only the last 8 are kept"):
        greedy(samplers[0], prompt)
    assert greedy(samplers[1], prompt).sequences[0].tokens == greedy(samplers[-1], prompt).sequences[0].tokens


def test_samples_stop_and_seeds_repeat(model, service) -> None:
    base = service.create_sampling_client(base_model="tiny").result()
    prompt = types.ModelInput.from_ints([20, 30, 40])

    def draw(samples: int = 1, **params: Any) -> Any:
        chosen = types.SamplingParams(max_tokens=30, **params)
        return base.sample(prompt, samples, chosen).result().sequences

    sequences = draw(8, seed=3)
    assert [s.tokens for s in sequences] == [s.tokens for s in draw(8, seed=3)]
    assert len({tuple(s.tokens) for s in sequences}) == 8
    assert all(s.stop_reason == "length" and len(s.tokens) == 30 for s in draw(4, stop=[]))
    first = draw(1, seed=3, stop=[])[0].tokens
    stopped = draw(1, seed=3, stop=[first[4]])[0]
    assert stopped.stop_reason == "stop"
    assert stopped.tokens == first[: first.index(first[4]) + 1]
    text = AutoTokenizer.from_pretrained(model).decode([first[4]])
    assert draw(1, seed=3, stop=text)[0].tokens == stopped.tokens
    answer = next(s for s in draw(64, seed=3) if s.stop_reason == "stop").tokens
    texts = [AutoTokenizer.from_pretrained(model).decode(answer[-1:]), "no such text"]
    assert answer in [s.tokens for s in draw(64, seed=3, stop=texts)], "a special token is not in the text of an answer"
    with pytest.raises(tinker.TinkerError, match="contains the special token '<eos>'"):
        draw(1, stop=[f"a{texts[0]}"])
    with pytest.raises(tinker.TinkerError, match="num_samples = 0"):
        draw(0)


def test_a_state_continues_exactly_and_weights_alone_begin_a_new_optimizer(model, folder, service) -> None:
    client, data = trained(service), [datum(k, "cross_entropy") for k in range(3)]

    def step(training_client: Any) -> list[list[float]]:
        training_client.forward_backward(data, "cross_entropy").result()
        training_client.optim_step(ADAM).result()
        return [o["logprobs"].tolist() for o in training_client.forward(data, "cross_entropy").result().loss_fn_outputs]

    step(client)
    path = client.save_state("middle").result().path
    expected = step(client)
    restored = service.create_training_client_from_state_with_optimizer(path).result()
    weights = service.create_training_client_from_state(path).result()
    assert step(restored) == expected
    plain = Plain(model, state_of(folder, path))
    sum(plain.loss(item, "cross_entropy", {}) for item in data).backward()
    plain.step(ADAM)
    for logprobs, item in zip(step(weights), data, strict=True):
        assert logprobs == pytest.approx(plain.logprobs(item).tolist(), abs=TOLERANCE)
    with pytest.raises(tinker.RequestFailedError, match="exists"):
        client.save_state("middle").result()
    assert client.save_state("middle", overwrite=True).result().path == path


def test_a_damaged_state_changes_nothing_of_the_model_that_loads_it(folder, service) -> None:
    client, data = trained(service), [datum(k, "cross_entropy") for k in range(3)]

    def logprobs() -> list[list[float]]:
        return [o["logprobs"].tolist() for o in client.forward(data, "cross_entropy").result().loss_fn_outputs]

    def step() -> None:
        client.forward_backward(data, "cross_entropy").result()
        client.optim_step(ADAM).result()

    step()
    path = client.save_state("damaged").result().path
    step()
    checkpoint = client.save_state("whole").result().path
    expected = logprobs()
    file = state_of(folder, path) / "optimizer.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(tinker.RequestFailedError):
        client.load_state_with_optimizer(path).result()
    assert logprobs() == expected
    step()
    after = logprobs()
    client.load_state_with_optimizer(checkpoint).result()
    step()
    assert logprobs() == after


def test_no_session_names_a_folder_elsewhere(url) -> None:
    import httpx

    lora = {"rank": 4}
    body = {"session_id": "../away", "model_seq_id": 0, "base_model": "tiny", "lora_config": lora}
    key = {"X-API-Key": "tml-any"}
    created = httpx.post(f"{url}/api/v1/create_model", json=body, headers=key).json()
    result = httpx.post(f"{url}/api/v1/retrieve_future", json={"request_id": created["request_id"]}, headers=key)
    assert "is not a model" in result.json()["error"]


def test_a_web_page_needs_a_token(url) -> None:
    import httpx

    headers = {"X-API-Key": "tml-any", "Origin": "https://elsewhere.example", "Content-Type": "text/plain"}
    answer = httpx.post(f"{url}/api/v1/create_session", content="{}", headers=headers)
    assert answer.status_code == 403
    assert "need a token" in answer.json()["error"]


@pytest.mark.parametrize("content", ["[1]", "{"])
def test_a_request_that_is_no_json_object_is_refused(url, content) -> None:
    import httpx

    for path in ("weights_info", "asample"):
        answer = httpx.post(f"{url}/api/v1/{path}", content=content, headers={"X-API-Key": "tml-any"})
        assert answer.status_code == 422, path
        assert "the request is not one of tinker" in answer.json()["error"]


def test_a_client_that_leaves_within_its_request_is_no_error_of_the_server(url, caplog) -> None:
    import httpx

    address = httpx.URL(url)
    with socket.create_connection((address.host, address.port)) as client:
        head = b"POST /api/v1/asample HTTP/1.1\r\nHost: here\r\nX-API-Key: tml-any\r\nContent-Length: 9\r\n\r\n"
        client.sendall(head + b"{")
        assert httpx.get(f"{url}/api/v1/healthz").status_code == 200  # the server has begun to read the request
    for _ in range(3):
        assert httpx.get(f"{url}/api/v1/healthz").status_code == 200
    assert not [record for record in caplog.records if record.name == "aiohttp.server"]


def test_a_repeated_request_computes_nothing(url, service) -> None:
    """As a client sends it whose connection broke."""
    import httpx
    from tinker.proto.request_conv import forward_backward_request_to_proto
    from tinker.types.forward_backward_input import ForwardBackwardInput
    from tinker.types.forward_backward_request import ForwardBackwardRequest

    norms = []
    for times in (1, 3):
        client = trained(service)
        inputs = ForwardBackwardInput(data=[datum(1, "cross_entropy")], loss_fn="cross_entropy")
        request = ForwardBackwardRequest(forward_backward_input=inputs, model_id=client.model_id, seq_id=77)
        body = forward_backward_request_to_proto(request).SerializeToString()
        for _ in range(times):
            httpx.post(f"{url}/api/v1/forward_backward", content=body, headers={"X-API-Key": "tml-any"})
        norms.append(client.optim_step(ADAM).result().metrics["grad_norm"])
    assert norms[0] == norms[1]


def _bad(**inputs: Any) -> Any:
    good = datum(1, "cross_entropy")
    return types.Datum(model_input=good.model_input, loss_fn_inputs={**good.loss_fn_inputs, **inputs})


N = datum(1, "cross_entropy").model_input.length
REFUSED: Sequence[tuple[Callable[[Any], Any], str]] = [
    (lambda c: c.forward_backward([datum(1, "ppo")], "gspo"), "'gspo' is not supported"),
    (lambda c: c.forward_backward([datum(1, "ppo")], "ppo", {"beta": 1.0}), "no option 'beta'"),
    (lambda c: c.forward_backward([datum(1, "ppo")], "cross_entropy"), r"lacks \['weights'\]"),
    (lambda c: c.forward_backward([_bad(mask=torch.ones(N))], "cross_entropy"), "does not read .*mask"),
    (lambda c: c.forward_backward([_bad(weights=torch.ones(2))], "cross_entropy"), "weights must be finite"),
    (
        lambda c: c.forward_backward([_bad(weights=torch.full((N,), math.nan))], "cross_entropy"),
        "weights must be finite",
    ),
    (
        lambda c: c.forward_backward([_bad(target_tokens=torch.full((N,), 999))], "cross_entropy"),
        "the model's are 0 to",
    ),
    (lambda c: c.optim_step(ADAM), "there is no gradient"),
    (lambda c: c.save_state("../x"), "is not a checkpoint"),
]


def test_wrong_requests_are_refused_and_the_client_goes_on(service) -> None:
    client = trained(service)
    for call, cause in REFUSED:
        with pytest.raises(tinker.TinkerError, match=cause):
            call(client).result()
    client.forward_backward([datum(1, "cross_entropy")], "cross_entropy").result()
    assert client.optim_step(ADAM).result().metrics["lr"] == ADAM.learning_rate


def test_models_and_samples_that_are_not_here_are_refused(service) -> None:
    with pytest.raises(tinker.TinkerError, match="adapters of rank 4, got 8"):
        service.create_lora_training_client(base_model="tiny", rank=8).result()
    with pytest.raises(tinker.TinkerError, match="the base model here is 'tiny', got 'big'"):
        service.create_lora_training_client(base_model="big", rank=4).result()
    with pytest.raises(tinker.TinkerError, match="there is no checkpoint"):
        service.create_training_client_from_state("tinker://a:train:0/weights/none").result()
    with pytest.raises(tinker.TinkerError, match="is not a checkpoint"):
        service.create_sampling_client(model_path="tinker://..:train:0/weights/none").result()
    base = service.create_sampling_client(base_model="tiny").result()
    prompt = types.ModelInput.from_ints([20] * 60)
    with pytest.raises(tinker.TinkerError, match="must be at most 64"):
        base.sample(prompt, 1, types.SamplingParams(max_tokens=9)).result()


def test_a_client_of_a_server_that_was_started_again_is_told_what_to_do(url, service) -> None:
    import httpx

    def post(path: str, **body: Any) -> str:
        answer = httpx.post(f"{url}/api/v1/{path}", json=body, headers={"X-API-Key": "tml-any"})
        return answer.json().get("error") or answer.json()["request_id"]

    number = post("optim_step", model_id="old:train:0", seq_id=1, optim_params=ADAM.model_dump())
    assert "models end with the server. Create one, or load a saved state" in post("retrieve_future", request_id=number)
    assert "results end with the server" in post("retrieve_future", request_id="old:train:0/9")
    sampling = {"prompt": types.ModelInput.from_ints([5]).model_dump(), "sampling_params": {"max_tokens": 1}}
    assert "sessions end with the server" in post("asample", sampling_session_id="old:sample:0", **sampling)


def test_a_server_with_a_token_asks_for_it(model, tmp_path, monkeypatch) -> None:
    with serving(model, tmp_path, token="tml-secret") as address:
        monkeypatch.setenv("TINKER_API_KEY", "tml-other")
        with pytest.raises(tinker.TinkerError, match="not the server's token"):
            trained(tinker.ServiceClient(base_url=address))
        monkeypatch.setenv("TINKER_API_KEY", "tml-secret")
        with connected(address) as service:
            assert trained(service).model_id


@pytest.mark.parametrize(
    ("flags", "cause"),
    [
        ([("trainer.lr", "1e-3")], "trainer.lr: clients set it"),
        ([("policy.trainer.betas", "[0.9, 0.99]")], "policy.trainer.betas: clients set it"),
        ([("reward", "math")], "clients have their own rewards and environments"),
    ],
)
def test_options_that_no_client_could_follow_are_refused_before_the_start(model, flags, cause) -> None:
    options = [("policy.model", str(model)), *LORA, *flags]
    with pytest.raises(ConfigError, match=cause):
        place_policy(load(None, options, algorithm="serve_training"), Plugins.discover())


def test_a_checkpoint_becomes_a_model_that_transformers_loads(model, folder, service, tmp_path) -> None:
    client, data = trained(service), [datum(k, "cross_entropy") for k in range(3)]
    client.forward_backward(data, "cross_entropy")
    client.optim_step(types.AdamParams(learning_rate=3e-2)).result()
    path = client.save_state("done").result().path
    options = [("policy.model", str(model)), *LORA]
    policy = place_policy(load(None, options, algorithm="serve_training"), Plugins.discover())
    export(policy, "tiny", folder, path, tmp_path / "model")
    assert "rope_theta" in json.loads((tmp_path / "model" / "config.json").read_text()), "as transformers 4 reads it"
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    for output, item in zip(client.forward(data, "cross_entropy").result().loss_fn_outputs, data, strict=True):
        logits = exported(torch.tensor([item.model_input.to_ints()])).logits[0].log_softmax(-1)
        plain = logits.gather(1, item.loss_fn_inputs["target_tokens"].to_torch()[:, None])[:, 0]
        torch.testing.assert_close(output["logprobs"].to_torch(), plain.detach(), atol=TOLERANCE, rtol=0)
    with pytest.raises(ConfigError, match=r"exists\. Choose another folder"):
        export(policy, "tiny", folder, path, tmp_path / "model")
    with pytest.raises(ConfigError, match=r"there is no checkpoint .* in"):
        export(policy, "tiny", folder, f"{path}-none", tmp_path / "other")
