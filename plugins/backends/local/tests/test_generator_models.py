"""Architectures that the cache and the attention function support, and those that they refuse."""

import pytest
import torch
from rlhf.errors import ConfigError, ModelError
from rlhf.interfaces import GeneratorSpec
from rlhf.types import GenerationRequest, Sampling
from rlhf_plugin_local.generator import TransformersGenerator
from rlhf_plugin_local.kv_cache import SlotCache
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.tiny_architectures import tiny_architecture

SIZE = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": 1,
}
MODELS = {
    "qwen3": {"head_dim": 8},
    "qwen2": {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    "llama": {},
    "mistral": {"sliding_window": 7},
    "phi3": {"sliding_window": 9},
    "gemma2": {"head_dim": 8, "sliding_window": 5, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 9.0},
    "gemma3_text": {"head_dim": 8, "sliding_window": 5, "num_hidden_layers": 7},
    "olmo2": {},
    "cohere2": {"sliding_window": 6, "num_hidden_layers": 4},
    "gpt_oss": {"head_dim": 8, "sliding_window": 6, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256},
}


def make(kind, **options):
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**SIZE, **options})
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")


def generator(model, **options):
    instance = TransformersGenerator(TransformersGenerator.Config(**options), GeneratorSpec((1,), str))
    instance.load(model, 0)
    return instance


@pytest.mark.parametrize("kind", MODELS)
def test_samples_and_logprobs_are_those_of_a_full_forward_pass(kind):
    compare(make(kind, **MODELS[kind]).eval())


@pytest.mark.parametrize("kind", ["afmoe", "diffllama", "hrm_text", "mllama"])
def test_layers_that_call_attention_several_times_or_by_other_names_are_sampled_rightly(kind, tmp_path):
    compare(published(kind, tmp_path))


def published(kind, path):
    tiny_architecture(path, kind)
    return AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", dtype=torch.float32).eval()


def compare(model):
    prompts = [tuple(3 + (7 * i + p) % 50 for i in range(3 + 8 * p)) for p in range(3)]
    requests = [GenerationRequest(ids, s, Sampling(25, 1.2, ignore_eos=True)) for ids in prompts for s in range(3)]
    turns = dict(generator(model, max_batch=5).generate(requests))
    used = set()
    for i, request in enumerate(requests):
        ids = torch.tensor([[*request.ids, *turns[i].ids]])
        with torch.no_grad():
            logits = model(ids, use_cache=False).logits[0, len(request.ids) - 1 : -1].float() / 1.2
        want = logits.log_softmax(-1).gather(1, torch.tensor(turns[i].ids)[:, None])[:, 0]
        assert (torch.tensor(turns[i].logprobs) - want).abs().max() < 1e-5
        used |= set(turns[i].ids)
    assert len(used) > 15
    assert model.config._attn_implementation == "eager"


def test_a_model_with_a_mask_of_its_own_is_refused(tmp_path):
    with pytest.raises(ModelError, match="DogeAttention passes its own mask to its attention"):
        generator(published("doge", tmp_path))


def test_decoding_steps_that_give_other_logprobs_are_refused(monkeypatch):
    def last_layer_only(cache, layer, index_SH, key_SHD, value_SHD):
        write(cache, len(cache.keys) - 1, index_SH, key_SHD, value_SHD)

    write = SlotCache.write
    monkeypatch.setattr(SlotCache, "write", last_layer_only)
    with pytest.raises(ModelError, match="computes different log-probs with the attention of this generator"):
        generator(make("llama"))


def test_an_error_of_a_models_code_in_a_decoding_step_is_a_refusal(monkeypatch):
    monkeypatch.setattr(SlotCache, "write", lambda *args: {}["layer"])
    with pytest.raises(ModelError, match=r"token by token here \(KeyError: 'layer'\).*cannot sample from it"):
        generator(make("llama"))


def test_long_prompts_with_windows_are_computed_in_blocks(monkeypatch):
    monkeypatch.setattr("rlhf_plugin_local.sampling_attention.QUERIES", 16)
    for kind in ("mistral", "gemma2", "gpt_oss"):
        test_samples_and_logprobs_are_those_of_a_full_forward_pass(kind)


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        ("mamba", {"state_size": 4}, "layers of type linear_attention"),
        ("rwkv", {}, "recurrent state"),
        ("lfm2", {"full_attn_idxs": [1]}, "layers of type conv"),
        ("qwen3_next", {"head_dim": 8, "num_hidden_layers": 4, "num_experts": 2}, "layers of type linear_attention"),
        ("bloom", {"n_layer": 2, "n_head": 4}, "does not take its attention function"),
    ],
)
def test_models_without_a_key_value_cache_are_refused(kind, options, words):
    with pytest.raises(ModelError, match=f"{words}.*cannot sample from it. Use another generator"):
        generator(make(kind, **options))


def test_rotary_embeddings_that_depend_on_neighbours_limit_the_length():
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    model = make("phi3", original_max_position_embeddings=32, rope_parameters=rope)
    assert len(list(generator(model).generate([GenerationRequest((3, 4), 0, Sampling(30))]))) == 1
    with pytest.raises(ConfigError, match=r"33 tokens .* original_max_position_embeddings \(longrope\) = 32"):
        generator(model).generate([GenerationRequest((3, 4), 0, Sampling(31))])


def test_attention_to_later_tokens_is_refused():
    model = make("gemma3_text", head_dim=8, use_bidirectional_attention=True)
    with pytest.raises(ModelError, match="attends to later tokens"):
        generator(model)


def test_a_module_that_is_not_a_language_model_is_refused():
    with pytest.raises(ModelError, match="PreTrainedModel"):
        generator(torch.nn.Linear(2, 2))
