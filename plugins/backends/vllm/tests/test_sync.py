"""A trainer's weights in a real engine: equal numbers after an update; every fault is detected and named."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from rlhf.errors import ModelError, SyncError
from rlhf.interfaces import ModelSpec
from rlhf.ops.heads import resolve_head
from rlhf.ops.packing import SequenceData, UnitData, pack
from rlhf.ops.reduce import weigh
from rlhf.types import GenerationRequest, RoleSpec, Sampling
from rlhf.weights.bucket import Bucket
from rlhf_plugin_local.launcher import LocalLauncher
from rlhf_plugin_local.trainer import TorchTrainer, TorchTrainerConfig
from rlhf_plugin_vllm.versions import release
from rlhf_runtime.config.sections import SyncSection
from rlhf_runtime.models.roles import Role
from rlhf_runtime.models.weight_sync import WeightSync
from rlhf_testing.models import model_path

from tests.support.losses import NllLoss

SIZES = {"head_dim": 32, "layers": 2}
CASES = {"qwen3, tied": ("qwen3", {}), "llama, untied": ("llama", {"tied": False})}
LOGPROBS = resolve_head("logprobs", None)
CANARY = [[20, 21, 22, 7, 55, 3, 90, 14, 14, 60], [1, 2, 3, 4, 5, 6, 7, 8]]


def batch(sequences):
    return pack([UnitData([SequenceData(ids, {"loss_mask": [i > 0 for i in range(len(ids))]})]) for ids in sequences])


class Setup:
    """A trained role, an engine, and the controller's sync between them."""

    def __init__(self, engines, case):
        architecture, sizes = CASES[case]
        self.tied = case.endswith(", tied")
        self.path = model_path(architecture, **SIZES, **sizes)
        self.generator = engines.get(self.path)
        spec = ModelSpec(RoleSpec("policy", trained=True), str(self.path), "fp32")
        group = LocalLauncher(None).launch_trainer(TorchTrainer, TorchTrainerConfig(lr=0.02, device="cpu"), spec)
        self.role, self.notes = Role(spec, group, 1000), []
        self.lost = lambda bucket: bucket
        """Applied to every bucket before the engine gets it."""
        take = type(self.generator).take
        self.generator.take = lambda bucket: take(self.generator, self.lost(bucket))

    def sync(self, **section):
        return WeightSync(self.role, self.generator, SyncSection(**section), 0, self.notes.append)

    def update(self, steps=4):
        draw = torch.Generator().manual_seed(1)
        rows = [torch.randint(3, 90, (20,), generator=draw).tolist() for _ in range(4)]
        for _ in range(steps):
            self.role.group.worker.update([weigh(batch(rows), NllLoss().reduce())], NllLoss(), {}, {})

    def logprobs(self, sequences=CANARY):
        flat = self.role.forward(batch(sequences), [LOGPROBS])["logprobs"]
        return [part[1:] for part in flat.split([len(s) for s in sequences])]

    def apart(self):
        """Largest difference of a token's log-prob, engine against trainer."""
        [scores] = self.generator.logprobs(CANARY)
        return max(float((torch.tensor(t) - o).abs().max()) for t, o in zip(scores, self.logprobs(), strict=True))


@pytest.fixture(params=CASES)
def setup(request, engines):
    instance = Setup(engines, request.param)
    instance.sync().push(0)
    yield instance
    del instance.generator.take


@pytest.fixture
def tied(engines):
    instance = Setup(engines, "qwen3, tied")
    instance.sync().push(0)
    instance.update(2)
    yield instance
    del instance.generator.take


def test_after_an_update_engine_and_trainer_agree(setup):
    old_logprobs = setup.logprobs()
    setup.update()
    moved = max(float((a - b).abs().max()) for a, b in zip(setup.logprobs(), old_logprobs, strict=True))
    assert moved > 0.5
    assert setup.apart() > 0.5
    metrics = setup.sync().push(1)
    assert metrics["sync/canary"] < 1e-5
    assert setup.apart() < 1e-5
    sampling = Sampling(20, 0.7, ignore_eos=True)
    for temperature in (0.7, 1.0, 1.3):
        sampling = Sampling(20, temperature, ignore_eos=True)
        requests = [GenerationRequest((20, 21, 22 + n), n, sampling) for n in range(6)]
        for n, turn in setup.generator.generate(requests):
            ids = [*requests[n].ids, *turn.ids]
            tempered = batch([ids]).with_column("tok", "temperature", torch.full((len(ids),), temperature))
            expected = setup.role.forward(tempered, [LOGPROBS])["logprobs"][-len(turn.ids) :]
            assert float((expected - torch.tensor(turn.logprobs)).abs().max()) < 1e-5
            assert turn.versions == ((0, 1),)


def test_every_tensor_is_fingerprinted_by_the_receiver(setup):
    proofs, _ = setup.sync()._send(setup.generator, 5)
    assert [(p.version, p.receiver, p.dtype) for p in proofs] == [(5, "the engine", "fp32")]
    fingerprints = setup.role.every("sent_fingerprints")[0]
    assert proofs[0].received == fingerprints
    assert proofs[0].peak_memory["process"] > 0
    assert proofs[0].nbytes == sum(p.nbytes for p in setup.role.group.worker.parameters.values())
    assert ("lm_head.weight" in fingerprints) == (not setup.tied)


@pytest.mark.parametrize("limit", [5000, 1])
def test_buckets_of_any_size_are_not_used_after_the_call(setup, limit):
    """A layer whose tensors arrive in different buckets must not refer to the memory of an earlier bucket. The load is
    repeated, because the failure may depend on the addresses of objects."""
    setup.update(1)
    for version in range(1, 9):
        setup.generator.begin_load(version)
        for bucket in setup.role.group.worker.buckets("live", limit):
            copies = tuple((name, tensor.clone()) for name, tensor in bucket.tensors)
            setup.generator.take(Bucket(copies, bucket.fingerprints))
            for _, tensor in copies:
                tensor.fill_(float("nan"))
        setup.generator.end_load()
        assert setup.apart() < 1e-5


def change(names, transform):
    def fault(bucket):
        tensors = tuple((n, transform(t.clone()) if n in names else t) for n, t in bucket.tensors)
        return Bucket(tensors, bucket.fingerprints)

    return fault


def swap(a, b):
    def fault(bucket):
        tensors = dict(bucket.tensors)
        tensors[a], tensors[b] = tensors[b], tensors[a]
        return Bucket(tuple(tensors.items()), bucket.fingerprints)

    return fault


def withhold(*names):
    return lambda bucket: Bucket(tuple(p for p in bucket.tensors if p[0] not in names), bucket.fingerprints)


DOWN, UP = "model.layers.1.mlp.down_proj.weight", "model.layers.0.mlp.up_proj.weight"
GATE, KEY = "model.layers.0.mlp.gate_proj.weight", "model.layers.1.self_attn.k_proj.weight"


@pytest.mark.parametrize("name", [KEY, "model.embed_tokens.weight"])
def test_a_missing_tensor_is_named_and_nothing_is_sampled(tied, name):
    tied.lost = withhold(name)
    with pytest.raises(SyncError, match=f"did not receive all weights of version 1: {name} did not arrive"):
        tied.sync().push(1)
    with pytest.raises(ModelError, match="weights of version 1 are not complete"):
        tied.generator.generate([GenerationRequest((20,), 0, Sampling(2))])
    tied.lost = lambda bucket: bucket
    tied.sync().push(1)
    assert tied.apart() < 1e-5


def test_two_swapped_tensors_of_one_shape_are_named(tied):
    tied.lost = swap(GATE, UP)
    with pytest.raises(SyncError, match=rf"received other values of {GATE}, {UP}\n") as raised:
        tied.sync().push(1)
    assert f"Stale in the generator: {GATE}, {UP}." in str(raised.value), "read back from the packed kernel"


def test_changed_tensors_are_named(tied):
    tied.lost = change([DOWN], lambda t: t.index_fill_(0, torch.tensor([3]), 1e-3))
    with pytest.raises(SyncError, match=f"received other values of {DOWN}"):
        tied.sync(canaries=0).push(1)


def test_a_stale_head_fails_the_canary_and_is_named(tied, monkeypatch):
    """vLLM's own reload does not update the packed copy of a tied head."""
    from rlhf_plugin_vllm.worker import reload  # imports vLLM, which takes seconds: not where tests are only collected

    if release() < (0, 28):
        pytest.skip("before 0.28 a tied head is the embedding itself, which a reload packs")
    monkeypatch.setattr(reload, "repack_tied", lambda layers: None)
    with pytest.raises(
        SyncError, match=r"canaries differ .* model\.embed_tokens\.weight \(as the tied lm_head, packed\)"
    ):
        tied.sync().push(1)


def test_a_stale_layer_fails_the_canary_and_is_named(tied, monkeypatch):
    """A tensor arrives and is fingerprinted, but the kernel multiplies with another one."""
    from rlhf_plugin_vllm.worker import reload

    load = reload.Reload.take

    def forget(self, bucket):
        marks = bucket.received()
        load(self, change([KEY], torch.zeros_like)(bucket))
        self.received |= marks

    monkeypatch.setattr(reload.Reload, "take", forget)
    with pytest.raises(SyncError, match=rf"canaries differ .* Stale in the generator: {KEY}\."):
        tied.sync().push(1)


def test_retry_repairs_a_transient_fault(tied):
    for fault in (change([DOWN], torch.zeros_like), withhold(KEY)):
        faults = iter([fault])
        tied.lost = lambda bucket, faults=faults: next(faults, lambda b: b)(bucket)
        assert tied.sync(check="retry").push(1)["sync/attempts"] == 2
        assert "sending the weights again" in tied.notes[-1]
        assert tied.apart() < 1e-5


def test_warn_accepts_wrong_values_but_no_incomplete_load(tied):
    tied.lost = change([DOWN], torch.zeros_like)
    assert tied.sync(check="warn").push(1)["sync/unproven"] == 1
    assert DOWN in tied.notes[-1]
    assert len(list(tied.generator.generate([GenerationRequest((20,), 0, Sampling(2))]))) == 1
    tied.lost = withhold(DOWN)
    with pytest.raises(SyncError, match="cannot continue with only some"):
        tied.sync(check="warn").push(2)


def test_tensors_of_another_model_are_refused(tied):
    tied.lost = lambda bucket: Bucket((*bucket.tensors, ("model.layers.7.mlp.up_proj.weight", torch.zeros(2))), ())
    with pytest.raises(SyncError, match=r"layers\.7.* is not the policy's"):
        tied.sync().push(1)
    tied.lost = change([DOWN], lambda t: t[:, :5])
    with pytest.raises(SyncError, match="is not the policy's"):
        tied.sync().push(1)
    tied.lost = lambda bucket: bucket
    tied.sync().push(2)
    assert tied.apart() < 1e-5


def test_keys_and_values_of_old_weights_are_dropped(tied):
    """A prompt of two blocks of the prefix cache, before and after a sync."""
    prompt = tuple(torch.randint(3, 90, (230,), generator=torch.Generator().manual_seed(0)).tolist())
    request = GenerationRequest(prompt, 3, Sampling(8, ignore_eos=True))

    def difference():
        [(_, turn)] = tied.generator.generate([request])
        expected = tied.role.forward(batch([[*prompt, *turn.ids]]), [LOGPROBS])["logprobs"][-8:]
        return float((expected - torch.tensor(turn.logprobs)).abs().max())

    tied.sync().push(1)
    assert difference() < 1e-5
    assert difference() < 1e-5, "from the cache"
    tied.update(2)
    tied.sync().push(2)
    assert difference() < 1e-5


def test_a_load_is_refused_while_samples_are_generated(tied):
    requests = [GenerationRequest((20,), n, Sampling(1 + 30 * n, ignore_eos=True)) for n in range(2)]
    running = tied.generator.generate(requests)
    next(running)
    with pytest.raises(ModelError, match=r"exhaust or close generate\(\) before begin_load"):
        tied.sync().push(1)
    with pytest.raises(ModelError, match=r"exhaust or close generate\(\) before sleep"):
        tied.generator.sleep()
    running.close()
    tied.sync().push(1)
    assert tied.apart() < 1e-5


THREE = {
    n: GenerationRequest((20, 21, 22 + n), n, Sampling(budget, 1.3, ignore_eos=True))
    for n, budget in enumerate((6, 7, 20))
}


def test_unfinished_samples_continue_with_new_weights(tied):
    """The second sample ends with its next token, which is sampled while the canaries are scored."""
    references = dict(tied.generator.generate(list(THREE.values())))
    answers = tied.generator.advance(THREE)
    while not answers:
        answers = tied.generator.advance({})
    assert answers == [(0, references[0])]
    tied.lost = withhold(DOWN)
    with pytest.raises(SyncError, match=f"{DOWN} did not arrive"):
        tied.sync().push(1)
    with pytest.raises(ModelError, match="cannot sample: its weights of version 1 are not complete"):
        tied.generator.advance({})
    tied.lost = lambda bucket: bucket
    tied.update(2)
    tied.sync().push(1)
    tied.sync().push(2)
    turns = dict(tied.generator.advance({}, seconds=60.0))
    assert set(turns) == {1, 2}
    for n, turn in turns.items():
        reference = references[n]
        assert turn.ids[:6] == reference.ids[:6]
        assert turn.logprobs[:6] == reference.logprobs[:6]
        assert (turn.versions[0], turn.versions[1][0], turn.versions[-1][1]) == ((0, 0), 6, 1 if n == 1 else 2)
        ids = [*THREE[n].ids, *turn.ids]
        tempered = batch([ids]).with_column("tok", "temperature", torch.full((len(ids),), 1.3))
        expected = tied.role.forward(tempered, [LOGPROBS])["logprobs"][-len(turn.ids) :]
        assert float((expected[6:] - torch.tensor(turn.logprobs[6:])).abs().max()) < 1e-5
        assert len(turn.ids) == len(reference.ids)
    assert tied.generator.engine.busy is False
    tied.update(1)
    tied.sync().push(3)


def test_unfinished_samples_may_keep_their_keys_and_no_other_sample_reads_them(tied, monkeypatch):
    """Prompts of two blocks of the prefix cache. The gap is what ``sync.keys = "keep"`` does to log-probs."""
    prompt = tuple(torch.randint(3, 90, (230,), generator=torch.Generator().manual_seed(0)).tolist())
    long, short = (GenerationRequest(prompt, n, Sampling(budget, ignore_eos=True)) for n, budget in enumerate((16, 8)))

    def difference(turn):
        expected = tied.role.forward(batch([[*prompt, *turn.ids]]), [LOGPROBS])["logprobs"][-len(turn.ids) :]
        return (expected - torch.tensor(turn.logprobs)).abs()

    gaps = {}
    for version, keys in enumerate(("recompute", "keep"), 1):
        monkeypatch.setattr(tied.generator, "spec", replace(tied.generator.spec, keys=keys))
        tied.sync().push(2 * version - 1)
        for new in ({0: long}, {}, {}, {}):
            tied.generator.advance(new)
        assert tied.generator.unfinished_tokens() == 4
        tied.update(2)
        tied.sync().push(2 * version)
        assert tied.generator.unfinished_tokens() in (4, 5), "the canaries may take one token along"
        turns = dict(tied.generator.advance({1: short}, seconds=60.0))
        assert turns[0].versions == ((0, 2 * version - 1), (turns[0].versions[1][0], 2 * version))
        gaps[keys] = float(difference(turns[0])[5:].mean())
        assert float(difference(turns[1]).max()) < 1e-5, "a new sample of the same prompt reads no old key"
    print(f"mean difference of log-probs after the new weights: {gaps}")
    assert gaps["recompute"] < 1e-5
    assert gaps["keep"] > 1e-3
    assert tied.generator.unfinished_tokens() == 0


def test_the_same_weights_sent_again_start_no_new_version(tied):
    """As after an engine was replaced."""
    tied.sync().push(3)
    reference = dict(tied.generator.generate([THREE[2]]))
    tied.generator.advance({0: THREE[2]})
    tied.sync().push(3)
    [(_, turn)] = tied.generator.advance({}, seconds=60.0)
    assert (turn.ids, turn.versions) == (reference[0].ids, ((0, 3),))
    assert turn.logprobs.tolist() == pytest.approx(reference[0].logprobs.tolist(), abs=1e-5)  # keys are computed again


def test_unfinished_samples_start_again_with_new_weights(tied, monkeypatch):
    monkeypatch.setattr(tied.generator, "spec", replace(tied.generator.spec, in_flight="restart"))
    tied.generator.advance({7: THREE[2]})
    tied.generator.advance({})
    tied.update(2)
    tied.sync().push(1)
    [(name, turn)] = tied.generator.advance({}, seconds=60.0)
    [(_, after)] = tied.generator.generate([THREE[2]])
    assert (name, turn) == (7, after)
    assert turn.versions == ((0, 1),)


def test_requests_may_come_at_any_time_and_be_dropped(tied):
    references = dict(tied.generator.generate(list(THREE.values())))
    answers = tied.generator.advance({2: THREE[2]})
    answers += tied.generator.advance({0: THREE[0], 1: THREE[1]})
    answers += tied.generator.advance({}, dropped=[1, 99], seconds=60.0)
    assert dict(answers) == {0: references[0], 2: references[2]}
    assert tied.generator.engine.busy is False


def test_calls_of_a_load_in_the_wrong_order_are_refused(tied):
    bucket = next(tied.role.group.worker.buckets("live"))
    with pytest.raises(SyncError, match=r"take\(\) without begin_load"):
        tied.generator.take(bucket)
    with pytest.raises(SyncError, match=r"end_load\(\) without begin_load"):
        tied.generator.end_load()
    tied.generator.begin_load(1)
    tied.generator.take(withhold(DOWN)(bucket))
    tied.sync().push(1)  # starts a new load; the tensors of the unfinished load do not count
    assert tied.apart() < 1e-5
