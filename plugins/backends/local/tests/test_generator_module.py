"""The trainer's module is restored in all cases; refusals."""

import pytest
import torch
from rlhf.errors import ConfigError, ModelError
from rlhf.interfaces import GeneratorSpec
from rlhf.types import GenerationRequest, Sampling
from rlhf_plugin_local.generator import TransformersGenerator
from sampling_cases import EOS, Config, requests, sample


def state(model):
    return (
        [m.training for m in model.modules()],
        model.config._attn_implementation,
        model.config.use_cache,
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        {n: (p.requires_grad, p._version, p.data_ptr()) for n, p in model.named_parameters()},
    )


@pytest.fixture
def mixed(model):
    """A module with one part in evaluation mode and gradients on some parameters."""
    model.model.layers[0].eval()
    model.zero_grad()
    model(torch.tensor([[3, 4, 5]])).logits.sum().backward()
    yield model
    model.train()
    model.zero_grad()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_module_is_restored_at_every_sample_and_at_the_end(build, mixed, dtype):
    old_state, grads = state(mixed), [p.grad.clone() for p in mixed.parameters()]
    for _ in build(dtype=dtype, max_batch=4).generate(requests()):
        assert state(mixed) == old_state
    assert state(mixed) == old_state
    assert all(torch.equal(p.grad, g) for p, g in zip(mixed.parameters(), grads, strict=True))


def test_the_module_is_restored_when_the_consumer_stops_early(build, mixed):
    old_state = state(mixed)
    stream = build(max_batch=2).generate(requests())
    next(stream)
    assert state(mixed) == old_state
    stream.close()
    assert state(mixed) == old_state


def test_a_consumer_may_train_between_samples(build, mixed):
    undisturbed = sample(build(max_batch=4), requests())
    ids = {}
    for position, turn in build(max_batch=4).generate(requests()):
        mixed(torch.tensor([[3, 4, 5]]), use_cache=False).logits.sum().backward()
        ids[position] = turn.ids
    assert ids == {n: turn.ids for n, turn in enumerate(undisturbed)}, "gradients change no weight"


@pytest.mark.parametrize("after", [1, 6])
def test_the_module_is_restored_after_an_error(build, mixed, after):
    old_state, calls, generator = state(mixed), [], build()

    def fail(*_):
        calls.append(1)
        if len(calls) == after:
            raise RuntimeError("out of order")

    hook = mixed.model.norm.register_forward_hook(fail)
    try:
        with pytest.raises(RuntimeError, match="out of order"):
            list(generator.generate(requests()))
    finally:
        hook.remove()
    assert state(mixed) == old_state
    assert list(build().generate(requests(1, 1)))


def test_automatic_dtype_follows_the_trainer(model, decode):
    class Precision:
        bf16 = True

    class Trainer:
        module = model
        precision = Precision

    def logprobs(source, **options):
        generator = TransformersGenerator(Config(**options), GeneratorSpec((EOS,), decode))
        generator.load(source, 0)
        return torch.tensor([t.logprobs[0] for t in sample(generator, requests(max_new_tokens=1, temperature=0.0))])

    auto, fp32 = logprobs(Trainer), logprobs(Trainer, dtype="fp32")
    assert torch.equal(auto, logprobs(model, dtype="bf16"))
    assert torch.equal(fp32, logprobs(model))
    assert 0 < (auto - fp32).abs().max() < 0.1


# ---------------------------------------------------------------------------------------- refusals


def test_fp32_beside_weights_in_bf16_is_refused_before_the_model_is_loaded(decode):
    spec = GeneratorSpec((EOS,), decode, storage="bf16")
    with pytest.raises(ConfigError, match=r"generator\.dtype is 'fp32' but the trainer's weights are bf16"):
        TransformersGenerator.check(Config(dtype="fp32"), spec, [], None)
    TransformersGenerator.check(Config(dtype="bf16"), spec, [], None)


def test_weights_that_change_during_sampling_are_refused(build, model):
    generator = build(max_batch=2)
    stream = generator.generate(requests())
    next(stream)
    generator.load(model, 4)
    with pytest.raises(ModelError, match=r"weights changed from version 3 to 4.*close generate\(\) before load"):
        list(stream)


def test_sampling_needs_weights(decode):
    with pytest.raises(ModelError, match=r"no weights yet; call load\(trainer, version\)"):
        TransformersGenerator(None, GeneratorSpec((EOS,), decode)).generate(requests())


def test_a_source_without_a_module_is_refused(build):
    with pytest.raises(ModelError, match="samples from a module in this process, but list does not provide a module"):
        build().load([], 1)


def test_requests_are_checked_before_anything_is_computed(build):
    generator = build()
    good, bad = (
        requests(1, 1)[0],
        [
            (GenerationRequest((), 0, Sampling()), "request 1 has no tokens"),
            (GenerationRequest((3, 500), 0, Sampling()), "request 1 has token 500; the model's ids are 0 to 9"),
            (GenerationRequest((-1, 3), 0, Sampling()), "request 1 has token -1"),
            (GenerationRequest((3,), 0, Sampling(top_p=0.0)), "top_p is 0.0"),
            (GenerationRequest((3,), -4, Sampling()), "request 1 has seed -4; a seed is an integer from 0"),
            (
                GenerationRequest((3,), 0, Sampling(max_new_tokens=5000)),
                "may need 5001 tokens .* max_position_embeddings = 4096",
            ),
        ],
    )
    for request, words in bad:
        with pytest.raises(ConfigError, match=words):
            generator.generate([good, request])
    assert not generator.work


def test_logits_that_are_not_finite_are_an_error(build, model):
    with torch.no_grad():
        saved = model.model.norm.weight.clone()
        model.model.norm.weight[0] = float("nan")
    try:
        with pytest.raises(ModelError, match=r"logits are not finite .* request 0"):
            list(build().generate(requests(1)))
    finally:
        with torch.no_grad():
            model.model.norm.weight.copy_(saved)
