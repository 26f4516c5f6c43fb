"""The Tinker protocol over HTTP. A request for a computation is answered at once with a number, by which clients
request the result."""

from __future__ import annotations

import asyncio
import logging
import threading
import uuid
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from aiohttp import web
from pydantic import TypeAdapter, ValidationError
from rlhf.errors import RlhfError
from rlhf.types import Sampling
from rlhf_runtime.calls.main_thread import MainThread
from rlhf_runtime.data.tokenizer import check_stops, with_stop_tokens
from tinker import __version__ as VERSION
from tinker import types
from tinker.types.try_again_response import TryAgainResponse

from rlhf_cli.serve_reward.access import PAGE, Access
from rlhf_cli.serve_training.losses import BadRequest
from rlhf_cli.serve_training.models import BASE, SampleQuestion, TrainedModels
from rlhf_cli.serve_training.wire import check_ids, read_learning, write_learned, write_samples

_LOG = logging.getLogger(__name__)
WAIT = 20.0
"""Seconds for which a request waits for a result. Clients then repeat it."""
MAX_ANSWERS = 1000
"""Number of results that are kept after a client got them. A client whose connection broke requests them again."""
LARGEST = 64 * 2**20
"""Largest size of a request in bytes. Clients send at most 5 MB of data at once."""
PROTOBUF = "application/x-protobuf"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True)
class Served:
    """The model that the server offers."""

    name: str
    """Name of the base model for clients."""
    tokenizer_id: str
    """Folder or hub name of the tokenizer, for clients."""
    tokenizer: Any
    vocabulary: int
    longest: int
    """Largest number of tokens of a sequence, prompt and answer together."""
    rank: int
    check_sampling: Callable[[Sampling], None]
    """Refuses what the generator cannot sample."""


class TrainingApplication:
    """Handlers run on the event loop and pass computations to the main thread, in the order of arrival. Waiting sample
    requests for the same checkpoint are computed together."""

    def __init__(self, served: Served, access: Access, main: MainThread, models: TrainedModels) -> None:
        self._served, self._access, self._main, self._models = served, access, main, models
        self._results: dict[str, asyncio.Task[Any]] = {}
        self._fetched_ids: OrderedDict[str, None] = OrderedDict()
        """The results that a client got, oldest first."""
        self._samplers: dict[str, str] = {}
        """{sampling session: checkpoint or BASE}."""
        self._waiting: dict[str, list[tuple[SampleQuestion, asyncio.Future[bytes]]]] = {}
        """{checkpoint or BASE: sample requests for it that no job has taken yet}."""
        # _draw() runs on the main thread, and _answer() on the event loop.
        self._guard = threading.Lock()
        self.web = web.Application(client_max_size=LARGEST, middlewares=[self._middleware])
        self.web.add_routes([web.get("/api/v1/healthz", self._health), web.post("/api/v1/telemetry", self._telemetry)])
        for path, method in {
            "client/config": self._client_config,
            "client/dynamic_config": self._dynamic_config,
            "create_session": self._create_session,
            "session_heartbeat": self._heartbeat,
            "sessions/{session}/finish": self._finish,
            "create_model": self._create_model,
            "get_info": self._info,
            "forward_backward": self._forward_backward,
            "optim_step": self._optim_step,
            "save_weights": self._save_weights,
            "save_weights_for_sampler": self._save_for_sampler,
            "load_weights": self._load_weights,
            "weights_info": self._weights_info,
            "create_sampling_session": self._create_sampler,
            "asample": self._sample,
            "retrieve_future": self._retrieve,
        }.items():
            self.web.add_routes([web.post(f"/api/v1/{path}", method)])
        for path, method in {"get_server_capabilities": self._capabilities, "samplers/{name}": self._sampler}.items():
            self.web.add_routes([web.get(f"/api/v1/{path}", method)])

    # ------------------------------------------------------------------------------------- sessions

    async def _health(self, request: web.Request) -> web.Response:
        return _json(types.HealthResponse(status="ok"))

    async def _telemetry(self, request: web.Request) -> web.Response:
        """Telemetry of clients is dropped."""
        return web.json_response({"status": "accepted"})

    async def _client_config(self, request: web.Request) -> web.Response:
        """Parts of a batch come one after another, so that they are computed in the order of their numbers."""
        return _json(types.ClientConfigResponse(parallel_fwdbwd_chunks=False, use_pyqwest_transport=False))

    async def _dynamic_config(self, request: web.Request) -> web.Response:
        return _json(types.ClientDynamicConfigResponse())

    async def _create_session(self, request: web.Request) -> web.Response:
        return _json(types.CreateSessionResponse(session_id=uuid.uuid4().hex[:12]))

    async def _heartbeat(self, request: web.Request) -> web.Response:
        return _json(types.SessionHeartbeatResponse())

    async def _finish(self, request: web.Request) -> web.Response:
        return web.Response(status=204)

    async def _capabilities(self, request: web.Request) -> web.Response:
        model = types.SupportedModel(
            model_name=self._served.name, max_context_length=self._served.longest, trainable=True, sampleable=True
        )
        return _json(types.GetServerCapabilitiesResponse(supported_models=[model]))

    # ------------------------------------------------------------------------------------- training

    async def _create_model(self, request: web.Request) -> web.Response:
        body = types.CreateModelRequest.model_validate_json(await request.read())
        self._check_base(body.base_model)
        lora = body.lora_config
        if lora is None or lora.rank != self._served.rank:
            raise BadRequest(
                f"this server trains adapters of rank {self._served.rank}, got {lora and lora.rank}. Ask for rank="
                f"{self._served.rank}, or start the server with --trainer.lora.rank"
            )
        if lora.seed is not None:
            raise BadRequest("seed: all models begin with the adapters of the server's --run.seed. Remove it")
        if not (lora.train_attn and lora.train_mlp):
            raise BadRequest("train_attn, train_mlp: the server's --trainer.lora.targets decides. Remove them")
        if body.optimizer_config.type != "adamw":
            raise BadRequest(f"optimizer {body.optimizer_config.type!r}: this server supports only adamw")
        name = f"{body.session_id}:train:{body.model_seq_id}"

        def create() -> types.CreateModelResponse:
            self._models.create(name)
            return types.CreateModelResponse(model_id=name)

        return self._begin(f"{name}/create", create, name)

    async def _info(self, request: web.Request) -> web.Response:
        body = types.GetInfoRequest.model_validate_json(await request.read())
        served = self._served
        data = types.ModelData(model_name=served.name, tokenizer_id=served.tokenizer_id)
        return _json(
            types.GetInfoResponse(
                model_data=data, model_id=body.model_id, is_lora=True, lora_rank=served.rank, model_name=served.name
            )
        )

    async def _forward_backward(self, request: web.Request) -> web.Response:
        body = read_learning(await request.read(), self._served.vocabulary, self._served.longest)

        def learn() -> bytes:
            logprobs, total = self._models.learn(body.model, body.data, body.loss, body.learns)
            return write_learned(logprobs, {"loss:sum": total})

        return self._begin(f"{body.model}/{body.number}", learn, body.model)

    async def _optim_step(self, request: web.Request) -> web.Response:
        body = types.OptimStepRequest.model_validate_json(await request.read())
        params = body.optim_params
        if not isinstance(params, types.AdamParams):
            raise BadRequest(f"optimizer {params.type!r}: this server supports only adamw")
        options = {
            "lr": params.learning_rate,
            "betas": (params.beta1, params.beta2),
            "eps": params.eps,
            "weight_decay": params.weight_decay,
            "max_grad_norm": params.grad_clip_norm if params.grad_clip_norm > 0 else None,
        }

        def step() -> types.OptimStepResponse:
            return types.OptimStepResponse(metrics=self._models.step(body.model_id, options))

        return self._begin(f"{body.model_id}/{body.seq_id}", step, body.model_id)

    # ---------------------------------------------------------------------------------- checkpoints

    async def _save_weights(self, request: web.Request) -> web.Response:
        body = types.SaveWeightsRequest.model_validate_json(await request.read())

        def save() -> types.SaveWeightsResponse:
            label = body.path or f"step-{body.seq_id}"
            return types.SaveWeightsResponse(path=self._models.save(body.model_id, "weights", label, body.overwrite))

        return self._begin(f"{body.model_id}/{body.seq_id}", save, body.model_id)

    async def _save_for_sampler(self, request: web.Request) -> web.Response:
        body = types.SaveWeightsForSamplerRequest.model_validate_json(await request.read())
        if body.kind != "snapshot":
            raise BadRequest(f"kind {body.kind!r}: only 'snapshot' is supported; a sampling client keeps its weights")

        def save() -> types.SaveWeightsForSamplerResponseInternal:
            if body.path is not None:
                path = self._models.save(body.model_id, "sampler_weights", body.path, overwrite=False)
                return types.SaveWeightsForSamplerResponseInternal(path=path)
            path = self._models.save_unnamed(body.model_id, f"unnamed-{body.seq_id}")
            session = body.model_id.partition(":")[0]
            sampler = self._add_sampler(session, body.sampling_session_seq_id, path)
            return types.SaveWeightsForSamplerResponseInternal(sampling_session_id=sampler)

        return self._begin(f"{body.model_id}/{body.seq_id}", save, body.model_id)

    async def _load_weights(self, request: web.Request) -> web.Response:
        body = types.LoadWeightsRequest.model_validate_json(await request.read())
        if body.base_model is not None:
            self._check_base(body.base_model)
        new = body.session_id is not None
        name = f"{body.session_id}:train:{body.model_seq_id}" if new else str(body.model_id)

        def load() -> types.LoadWeightsResponse:
            self._models.facts(body.path)
            if new:
                self._models.create(name)
            self._models.load(name, body.path, body.optimizer)
            return types.LoadWeightsResponse(path=body.path, model_id=name)

        return self._begin(f"{name}/{'load' if new else body.seq_id}", load, name)

    async def _weights_info(self, request: web.Request) -> web.Response:
        body = TypeAdapter(dict[str, Any]).validate_json(await request.read())
        facts = self._models.facts(str(body.get("tinker_path")))
        return _json(types.WeightsInfoResponse(**facts, is_lora=True))

    # ------------------------------------------------------------------------------------- sampling

    async def _create_sampler(self, request: web.Request) -> web.Response:
        body = types.CreateSamplingSessionRequest.model_validate_json(await request.read())
        source = body.model_path or BASE
        if body.model_path is not None:
            self._models.facts(body.model_path)
        else:
            self._check_base(body.base_model)
        sampler = self._add_sampler(body.session_id, body.sampling_session_seq_id, source)
        return _json(types.CreateSamplingSessionResponse(sampling_session_id=sampler))

    def _add_sampler(self, session: str, number: int | None, source: str) -> str:
        sampler = f"{session}:sample:{number}"
        self._samplers[sampler] = source
        return sampler

    async def _sampler(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        source = self._source(name)
        path = None if source == BASE else source
        return _json(types.GetSamplerResponse(sampler_id=name, base_model=self._served.name, model_path=path))

    def _source(self, sampler: str) -> str:
        if sampler not in self._samplers:
            raise BadRequest(f"there is no sampling session {sampler!r}: sessions end with the server. Create another")
        return self._samplers[sampler]

    async def _sample(self, request: web.Request) -> web.Response:
        body = types.SampleRequest.model_validate_json(await request.read())
        if body.sampling_session_id is not None:
            source = self._source(body.sampling_session_id)
        else:
            source = body.model_path or BASE
            if body.model_path is None:
                self._check_base(body.base_model)
        question = self._question(body)
        name = f"{body.sampling_session_id or uuid.uuid4().hex}/{body.seq_id}"
        ids = [f"{name}/{n}" for n in range(body.num_samples)]
        return self._begin_task(name, self._answer(source, question), sample_sequence_ids=ids)

    def _question(self, body: types.SampleRequest) -> SampleQuestion:
        served, params = self._served, body.sampling_params
        for option in (
            "topk_prompt_logprobs", "topk_sample_logprobs", "target_prompt_logprobs", "prompt_alt_tokens_k",
            "prompt_logprobs_last_n", "record_stability_info",
        ):  # fmt: skip
            if getattr(body, option):
                raise BadRequest(f"{option}: this server does not provide it. Remove it")
        if body.num_samples < 1:
            raise BadRequest(f"num_samples = {body.num_samples}: it must be at least 1")
        try:
            prompt = body.prompt.to_ints()
        except ValueError:
            raise BadRequest("the prompt has images or sound; this server takes only tokens") from None
        room = served.longest - len(prompt)
        tokens = params.max_tokens if params.max_tokens is not None else room
        if not prompt or tokens > room or room < 1:
            raise BadRequest(
                f"a prompt of {len(prompt)} tokens and max_tokens = {tokens}: together they must be at most "
                f"{served.longest} (data.max_tokens), with a prompt of at least one token"
            )
        check_ids(np.asarray(prompt), served.vocabulary, "the prompt")
        stop = [params.stop] if isinstance(params.stop, str) else list(params.stop or ())
        texts, stop_ids = [s for s in stop if isinstance(s, str)], [s for s in stop if isinstance(s, int)]
        sampling = Sampling(
            tokens, params.temperature, params.top_p, max(params.top_k, 0), stop_token_ids=tuple(stop_ids),
            stop=tuple(texts), ignore_eos=params.stop is not None,
        )  # fmt: skip
        served.check_sampling(sampling)
        sampling = with_stop_tokens(sampling, served.tokenizer)
        check_stops(sampling.stop, served.tokenizer)
        return SampleQuestion(prompt, sampling, body.num_samples, params.seed, bool(body.prompt_logprobs))

    async def _answer(self, source: str, question: SampleQuestion) -> bytes:
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        with self._guard:
            self._waiting.setdefault(source, []).append((question, answer))
        for waiting, result in await self._main.call(partial(self._draw, source)):
            if isinstance(result, bytes):
                waiting.set_result(result)
            else:
                waiting.set_exception(result)
        return await answer

    def _draw(self, source: str) -> list[tuple[asyncio.Future[bytes], bytes | Exception]]:
        """On the main thread: the answers to all waiting sample requests for a checkpoint. The first of their jobs
        computes all of them, the others none."""
        with self._guard:
            waiting = self._waiting.pop(source, [])
        if not waiting:
            return []
        try:
            results = self._models.sample(source, [question for question, _ in waiting])
            return [(answer, write_samples(*r)) for (_, answer), r in zip(waiting, results, strict=True)]
        except Exception as error:
            return [(answer, error) for _, answer in waiting]

    def _check_base(self, name: str | None) -> None:
        if name != self._served.name:
            raise BadRequest(f"the base model here is {self._served.name!r}, got {name!r}. Give the base model's name")

    # -------------------------------------------------------------------------------------- results

    def _begin(self, name: str, compute: Callable[[], Any], model: str) -> web.Response:
        """Let the main thread compute, and answer with the number of the result. A request that is sent again, after
        its connection broke, gets the same number and computes nothing."""
        return self._begin_task(name, self._main.call(compute), model_id=model)

    def _begin_task(self, name: str, coroutine: Coroutine[Any, Any, Any], **facts: Any) -> web.Response:
        if name in self._results:
            # Python warns about a coroutine that is never awaited.
            coroutine.close()
        else:
            self._results[name] = asyncio.ensure_future(coroutine)
        return _json(types.UntypedAPIFuture(request_id=name, **facts))

    async def _retrieve(self, request: web.Request) -> web.Response:
        body = types.FutureRetrieveRequest.model_validate_json(await request.read())
        task = self._results.get(body.request_id)
        if task is None:
            cause = f"there is no request {body.request_id!r}: results end with the server. Send the request again"
            return web.json_response({"error": cause}, status=404)
        await asyncio.wait({task}, timeout=WAIT)
        if not task.done():
            return _json(TryAgainResponse(request_id=body.request_id, queue_state="active"))
        self._fetched_ids[body.request_id] = None
        while len(self._fetched_ids) > MAX_ANSWERS:
            self._results.pop(self._fetched_ids.popitem(last=False)[0])
        error = task.exception()
        if error is None:
            result = task.result()
            if isinstance(result, bytes):
                return web.Response(body=result, content_type=PROTOBUF)
            return _json(result)
        of_user = isinstance(error, BadRequest | RlhfError)
        if not of_user:
            _LOG.error("a request failed", exc_info=error)
        text = str(error) if of_user else f"{type(error).__name__}: {error}"
        return web.json_response({"error": text, "category": "user" if of_user else "server"})

    @web.middleware
    async def _middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if not self._access.allows(f"Bearer {request.headers.get('X-API-Key', '')}"):
            return web.json_response({"error": "the API key is not the server's token (--token-env)"}, status=401)
        if self._access.refuses_page(request.headers):
            return web.json_response({"error": PAGE}, status=403)
        try:
            return await handler(request)
        except ValidationError as error:
            return web.json_response({"error": f"the request is not one of tinker {VERSION}: {error}"}, status=422)
        except (BadRequest, RlhfError) as error:
            return web.json_response({"error": str(error)}, status=422)
        except ConnectionError:  # the client left before its request was complete, so nobody reads the answer
            return web.Response(status=400)
        except web.HTTPException as error:
            text = f"{error.reason}: {request.method} {request.path} is not served by `rlhf serve-training`"
            return web.json_response({"error": text}, status=error.status)


def _json(answer: Any) -> web.Response:
    return web.json_response(text=answer.model_dump_json())
