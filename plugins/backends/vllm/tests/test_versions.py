"""What differs between versions of vLLM. The name of a test says where something stands in for another version."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from rlhf_plugin_vllm import versions

NEWER, OLDER = "get_file_store_init_method", "get_distributed_init_method"


@pytest.mark.parametrize("name", [NEWER, OLDER])
def test_workers_meet_through_the_file_by_a_stand_in_for_a_vllm_before_0_28_too(monkeypatch, tmp_path, name):
    from vllm.v1.executor import multiproc_executor, uniproc_executor

    for module in (multiproc_executor, uniproc_executor):
        if name == OLDER:
            monkeypatch.delattr(module, NEWER, raising=False)
        elif not hasattr(module, NEWER):
            pytest.skip("the installed vLLM is older than 0.28")
    file, original = tmp_path / "vllm_dist_0", getattr(uniproc_executor, name)
    with versions.meeting_at(file):
        # the older one gets an address and a port
        address = getattr(uniproc_executor, name)(*(("127.0.0.1", 1) if name == OLDER else ()))
    assert getattr(uniproc_executor, name) is original
    store, rank, size = next(torch.distributed.rendezvous(address, rank=0, world_size=1))
    store.set("key", "value")
    assert (rank, size, file.is_file()) == (0, 1, True)
    if name == OLDER:
        assert address.split(":")[-1] == file.name, "by this it names the memory that workers share"


def test_process_groups_stay_for_other_engines_as_an_executor_of_vllm_0_33_closes(monkeypatch):
    from vllm.distributed import parallel_state
    from vllm.v1.engine import core

    originals = parallel_state.destroy_model_parallel, core.cleanup_dist_env_and_memory
    group = SimpleNamespace(destroy=lambda: pytest.fail("other engines use the group"))
    monkeypatch.setattr(parallel_state, "_TP", group)
    with versions.keeping_process_groups():
        parallel_state.destroy_model_parallel()
        core.cleanup_dist_env_and_memory()
    assert parallel_state._TP is group
    assert originals == (parallel_state.destroy_model_parallel, core.cleanup_dist_env_and_memory)


def test_names_are_mapped_by_the_mapper_of_the_installed_version_and_by_a_stand_in_for_one_before_0_31():
    from vllm.model_executor.models.utils import WeightsMapper

    mapper = WeightsMapper(orig_to_new_prefix={"model.": "language_model.model."})
    assert versions.rename(mapper, "model.norm.weight") == "language_model.model.norm.weight"
    assert versions.rename(SimpleNamespace(_map_name=str.upper), "norm") == "NORM"


@pytest.mark.parametrize(("version", "native"), [((0, 26), True), ((0, 29), True), ((0, 30), False), ((0, 33), False)])
def test_a_cpu_draws_with_every_seed_of_a_mixed_batch_by_a_stand_in_for_the_version(monkeypatch, version, native):
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

    original = TopKTopPSampler.forward_cpu
    monkeypatch.setattr(TopKTopPSampler, "forward_cpu", original)  # restored after the test
    monkeypatch.setattr(versions, "release", lambda: version)
    versions.keep_seeds_on_a_cpu()
    assert TopKTopPSampler.forward_cpu is (TopKTopPSampler.forward_native if native else original)
    if native:
        logits, draws = torch.zeros(2, 100), set()
        for _ in range(3):
            sampler = SimpleNamespace(logprobs_mode="processed_logprobs", use_fp64_gumbel=False)
            generators = {0: torch.Generator().manual_seed(7)}  # the second request has no seed
            tokens, _ = TopKTopPSampler.forward_cpu(sampler, logits.clone(), generators, None, None)
            draws.add(int(tokens[0]))
        assert len(draws) == 1
