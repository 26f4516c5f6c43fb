"""New weights arrive whole, in place and provably; every way to get stale ones is caught and named."""

from __future__ import annotations

import pickle
from contextlib import suppress
from dataclasses import replace
from functools import partial
from io import BytesIO
from itertools import repeat

import PIL.Image
import pytest
import torch
from rlhf.errors import CapabilityError, SyncError, WorkerError
from rlhf.interfaces import EnginePool, Generator, ModelSpec, Place, Proof, Sleeps, TrainerFacts, WorkerGroup
from rlhf.interfaces.model import ADAPTERS, PARTS
from rlhf.types import Image, RoleSpec
from rlhf.weights.bucket import Bucket, buckets
from rlhf_runtime.config.sections import SyncSection
from rlhf_runtime.models.precompute import PrecomputedRole, ValueTable
from rlhf_runtime.models.roles import Role
from rlhf_runtime.models.shared_devices import Phases
from rlhf_runtime.models.weight_sync import WeightSync

VOCABULARY = 11


def logprobs(weights, ids, images=()):
    """A model whose prediction of a token is a row of ``body @ head`` chosen by the token before it. An image adds a
    row of ``tower`` at all tokens from its first one on."""
    hidden = weights["body"][ids[:-1]]
    for image in images:
        hidden[image.start :] += weights["tower"][sum(image.data) % VOCABULARY]
    return (hidden @ weights["head"]).log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


class ThreeTokens:
    """Makes three tokens of every image."""

    placeholder = 10

    def place(self, ids, images):
        assert ids == [self.placeholder]
        return [4, 10, 10], [], (Image(images[0], 0, 3, ids),)


class Bigram:
    def __init__(self):
        draw = torch.Generator().manual_seed(0)
        self.live = {
            n: torch.randn(VOCABULARY, VOCABULARY, generator=draw) for n in ("body", "head", "tower", "unused")
        }
        self.calls = []

    def facts(self):
        return TrainerFacts(vocabulary=VOCABULARY)

    def forward(self, micros, heads, view):
        out = []
        for micro in micros:
            pairs = zip(micro.ids_N.split(micro.lens_B.tolist()), micro.images_B or repeat(()), strict=False)
            parts = [torch.cat([torch.zeros(1), logprobs(self.live, ids.tolist(), images)]) for ids, images in pairs]
            out.append({"logprobs": torch.cat(parts)})
        return out

    def buckets(self, view, limit):
        self.marks = {}
        return buckets(self.live.items(), limit, self.marks)

    def sent_fingerprints(self):
        return self.marks

    def offload(self):
        self.calls.append("offload")

    def reload(self):
        self.calls.append("reload")


class Local(WorkerGroup):
    size = 1

    def __init__(self, trainer):
        self.trainer = trainer
        self.lost = lambda bucket: bucket
        """What happens to a bucket on its way."""

    def call(self, method, per_rank):
        return [getattr(self.trainer, method)(*per_rank[0])]

    def stream(self, method, *arguments, timeout=None):
        for item in getattr(self.trainer, method)(*arguments):
            yield self.lost(pickle.loads(pickle.dumps(item, protocol=5)))


class Copying(Sleeps, EnginePool):
    name = "copying"

    def __init__(self):
        self.held, self.calls = {}, []
        self.discards = False
        """Whether it discards its weights while it sleeps."""
        self.drafts = [(0, 0)]  # of each of its engines
        self.forgets = ()
        """Tensors that arrive and are not used."""

    def generate(self, requests):
        return iter(())

    async def answer(self, request):
        raise NotImplementedError

    def pause(self):
        self.calls.append("pause")

    def resume(self):
        self.calls.append("resume")

    def begin_load(self, version):
        self.calls.append("load")
        self.version, self.got, self.size = version, {}, 0

    def take(self, bucket):
        self.got |= bucket.received()
        self.size += bucket.nbytes
        self.held |= {
            name: t.clone() for name, t in bucket.tensors if name not in self.forgets or name not in self.held
        }

    def end_load(self):
        return [Proof(self.version, "", self.size, self.got, "", {"process": 2**20}, n) for n in self.drafts]

    def logprobs(self, sequences, images=()):
        self.calls.append("canaries")
        self.seen = list(zip(sequences, images or repeat(()), strict=False))
        return [[logprobs(self.held, ids, row_images).tolist() for ids, row_images in self.seen]]

    def stale(self, bucket):
        return [name for name, t in bucket.tensors if not torch.equal(self.held[name], t)]

    def sleep(self):
        self.calls.append("sleep")

    def wake(self):
        self.calls.append("wake")
        return self.discards


@pytest.fixture
def made():
    trainer, notes = Bigram(), []
    group, generator = Local(trainer), Copying()
    role = Role(ModelSpec(RoleSpec("policy", trained=True), "m"), group, 1000)

    def sync(longest=2048, images=None, **section):
        return WeightSync(role, generator, SyncSection(**section), 0, notes.append, longest, images)

    sync().push(0)
    generator.calls.clear()
    for tensor in trainer.live.values():  # one update
        tensor += 0.5 * tensor.roll(1, 0)
    return trainer, group, generator, sync, notes


def test_with_adapters_the_base_is_sent_only_where_an_engine_lacks_it(made, monkeypatch):
    trainer, _, generator, sync, _ = made
    views, end = [], generator.end_load

    def send(view, limit):
        views.append(view)
        trainer.marks = {}
        names = ["head"] if view == ADAPTERS else list(trainer.live)
        return buckets([(name, trainer.live[name]) for name in names], limit, trainer.marks)

    def end_load():
        proofs = end()
        generator.has_base = True
        return proofs

    monkeypatch.setattr(trainer, "buckets", send)
    monkeypatch.setattr(generator, "end_load", end_load)
    weights = WeightSync(sync().policy, generator, SyncSection(), 0, print, adapters=True)
    assert weights.push(1)["sync/MiB"] > weights.push(2)["sync/MiB"]
    generator.has_base = False  # an engine was replaced when the load began
    weights.push(3)
    weights.push(4)
    weights.refresh()
    assert views == [PARTS, ADAPTERS, PARTS, ADAPTERS, PARTS]

    def died():
        """An engine dies in the load: the pool replaces it, sends all again, and answers with the new proofs."""
        monkeypatch.setattr(generator, "end_load", end_load)
        end_load()
        weights.refresh()
        return [Proof(generator.version, nbytes=generator.size, received=generator.got)]

    monkeypatch.setattr(generator, "end_load", died)
    assert weights.push(5)["sync/version"] == 5
    assert views[-2:] == [ADAPTERS, PARTS]


@pytest.mark.parametrize(("longest", "tokens"), [(9, 9), (2048, 48)])
def test_canaries_are_no_longer_than_the_generator_accepts(made, longest, tokens):
    _, _, generator, sync, _ = made
    assert sync(longest).push(1)["sync/canary"] < 1e-6
    assert [len(ids) for ids, _ in generator.seen] == [tokens] * 2


def swap(bucket):
    (a, x), (b, y), *rest = bucket.tensors
    return Bucket(((a, y), (b, x), *rest), bucket.fingerprints)


def withhold(name):
    def lose(bucket):
        rest = [(p, mark) for p, mark in zip(bucket.tensors, bucket.fingerprints, strict=True) if p[0] != name]
        return Bucket(tuple(p for p, _ in rest), tuple(mark for _, mark in rest))

    return lose


def test_a_sync_reports_the_bytes_that_it_sent(made):
    trainer, _, generator, sync, _ = made
    metrics = sync(bucket_mb=1).push(1)
    assert all(torch.equal(generator.held[n], t) for n, t in trainer.live.items())
    assert metrics["sync/canary"] < 1e-6
    assert metrics == {"sync/version": 1, "sync/attempts": 1, "sync/canary": metrics["sync/canary"],
                       "sync/MiB": 4 * VOCABULARY**2 * 4 / 2**20}  # fmt: skip
    generator.drafts = [(6, 4), (0, 0), (2, 0)]
    assert sync().push(2)["sync/drafts_accepted"] == 0.5, "of all engines"


def test_the_generator_pauses_until_the_new_weights_are_proven(made):
    _, _, generator, sync, _ = made
    sync().push(1)
    assert generator.calls == ["pause", "load", "canaries", "resume"]


def test_the_pause_and_the_memory_of_a_sync_are_known(made):
    *_, sync, _ = made
    weights = sync()
    weights.push(1)
    first = weights.pause_seconds
    assert first > 0
    assert weights.peak_memory == [{"process": 2**20}]
    weights.refresh()
    assert weights.pause_seconds > first


def test_the_generator_stays_paused_after_a_failed_proof(made):
    _, _, generator, sync, _ = made
    generator.forgets = ("head",)
    with pytest.raises(SyncError, match="canaries differ"):
        sync().push(1)
    assert generator.calls == ["pause", "load", "canaries"]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (withhold("head"), "did not receive head"),
        (withhold("unused"), "did not receive unused"),  # the canary cannot see this one
        (swap, "received other values of body, head"),
    ],
)
def test_lost_or_swapped_tensors_are_named(made, fault, message):
    _, group, _, sync, _ = made
    group.lost = fault
    with pytest.raises(SyncError, match=message) as raised:
        sync().push(1)
    assert "the run stops" in str(raised.value).lower()


def test_a_tensor_that_arrived_and_is_not_used_fails_the_canary_and_is_named(made):
    _, _, generator, sync, _ = made
    generator.forgets = ("head",)
    with pytest.raises(SyncError, match=r"canaries differ .* Stale in the generator: head\."):
        sync().push(1)
    assert "sync/canary" in sync(canaries=0).push(2)  # what was asked for: fingerprints only


def test_a_run_with_images_has_the_canaries_of_text_and_one_with_an_image(made):
    _, _, generator, sync, notes = made
    sync().push(1)
    text, canaries = generator.seen, {}
    for version in (2, 1):
        assert sync(images=ThreeTokens()).push(version)["sync/canary"] < 1e-6
        canaries[version] = generator.seen[-1]
    assert generator.seen[:-1] == text
    ids, [image] = canaries[1]
    assert (len(ids), ids[1:4], image.start, image.tokens) == (1 + 3 + 48, [4, 10, 10], 1, 3)
    with PIL.Image.open(BytesIO(image.data)) as picture:
        assert (picture.format, picture.mode, picture.size) == ("PNG", "RGB", (64, 64))
    assert canaries[2][1][0].data != image.data
    sync(images=ThreeTokens()).push(1)
    assert generator.seen[-1] == canaries[1]
    sync(images=ThreeTokens(), canaries=0).push(3)
    assert generator.calls[-2:] == ["load", "resume"], "no canary of any kind"
    assert not notes


@pytest.mark.parametrize(("stale", "canary"), [("tower", "the canary with an image"), ("head", "the canaries")])
def test_the_message_names_the_canary_with_an_image_where_those_of_text_agree(made, stale, canary):
    _, _, generator, sync, _ = made
    generator.forgets = (stale,)
    with pytest.raises(SyncError, match=rf"log-probs of {canary} differ .* Stale in the generator: {stale}\."):
        sync(images=ThreeTokens()).push(1)


@pytest.mark.parametrize(("wrong", "compared"), [(1, False), (3, False), (4, True), (27, True)])
def test_tokens_after_the_image_are_compared(made, monkeypatch, wrong, compared):
    """The image has the positions 1 to 3. One token's log-prob is wrong by 1."""
    _, _, generator, sync, _ = made
    answer = generator.logprobs

    def engine(*arguments):
        [[*texts, values]] = answer(*arguments)
        return [[*texts, [x + (i + 1 == wrong) for i, x in enumerate(values)]]]

    monkeypatch.setattr(generator, "logprobs", engine)
    metrics = sync(images=ThreeTokens(), tolerance=0.1).push(1)
    assert metrics["sync/canary"] == pytest.approx(compared / 48, abs=1e-6)


def test_an_image_canary_has_room_for_a_token_after_the_image_or_is_left_out_with_a_note(made):
    _, _, generator, sync, notes = made
    assert sync(5, ThreeTokens()).push(1)["sync/canary"] < 1e-6
    assert [len(ids) for ids, _ in generator.seen] == [5, 5, 5]
    assert not notes
    weights = sync(4, ThreeTokens())
    for version in (2, 3):
        weights.push(version)
        assert [(len(ids), images) for ids, images in generator.seen] == [(4, ())] * 2
    [note] = notes
    assert "without an image canary, which needs more than 4 tokens" in note


@pytest.mark.parametrize(
    ("shift", "trainer_dtype", "generator_dtype", "tolerance", "passes"),
    [
        (5e-5, "fp32", "fp32", None, True),
        (2e-4, "fp32", "fp32", None, False),
        (0.25, "bf16", "fp32", None, True),
        (0.25, "fp32", "bf16", None, True),
        (0.35, "bf16", "bf16", None, False),
        (0.7, "bf16", "fp8", None, True),
        (0.9, "bf16", "fp8", None, False),
        (0.06, "fp32", "fp32", 0.07, True),
        (0.04, "bf16", "bf16", 0.03, False),
        (float("nan"), "bf16", "bf16", 9.0, False),
    ],
)
def test_the_tolerance_of_canaries_depends_on_the_arithmetic(
    made, monkeypatch, shift, trainer_dtype, generator_dtype, tolerance, passes
):
    """On average over a canary's tokens, in bf16 in the median over those of all canaries, of the worst engine."""
    _, _, generator, sync, _ = made
    prove, answer = generator.end_load, generator.logprobs

    def shifted(values):
        """Mean and median of the 47 differences are ``shift``."""
        return [*(x + (2 * shift if i % 2 else 0.0) for i, x in enumerate(values[:-1])), values[-1] + shift]

    def engines(sequences):
        [right] = answer(sequences)[:1]
        return [right, [shifted(values) for values in right], right]

    monkeypatch.setattr(generator, "logprobs", engines)
    monkeypatch.setattr(generator, "end_load", lambda: [replace(p, dtype=generator_dtype) for p in prove()])
    made_sync = sync() if tolerance is None else sync(tolerance=tolerance)
    monkeypatch.setattr(made_sync.policy, "facts", replace(made_sync.policy.facts, dtype=trainer_dtype))
    if passes:
        assert made_sync.push(1)["sync/canary"] == pytest.approx(shift, rel=0.01)
    else:
        message = r"differ from the trainer's by .* (on average|in the median); at most .* allowed .*No single tensor"
        with pytest.raises(SyncError, match=message):
            made_sync.push(1)


def test_buckets_are_as_large_as_the_run_file_says(made, monkeypatch):
    trainer, _, _, sync, _ = made
    limits, buckets = [], trainer.buckets
    monkeypatch.setattr(trainer, "buckets", lambda view, limit: limits.append((view, limit)) or buckets(view, limit))
    sync(bucket_mb=3).push(1)
    assert limits == [("live", 3 * 1024 * 1024)]


def test_of_many_lost_tensors_eight_are_named(made):
    trainer, group, _, sync, _ = made
    trainer.live |= {f"layer{i}": torch.zeros(1) for i in range(10)}
    group.lost = lambda bucket: Bucket(bucket.tensors[:4], bucket.fingerprints[:4])
    with pytest.raises(SyncError, match=r"did not receive layer0, (layer\d, ){6}layer7 and 2 more"):
        sync().push(1)


def test_retry_sends_once_more_and_warn_goes_on(made):
    _, group, _, sync, notes = made
    faults = iter([withhold("body")])
    group.lost = lambda bucket: next(faults, lambda b: b)(bucket)
    assert sync(check="retry").push(1)["sync/attempts"] == 2
    assert "sending the weights again" in notes[-1]
    group.lost = withhold("body")
    with pytest.raises(SyncError, match="did not receive body"):
        sync(check="retry").push(2)
    assert sync(check="warn").push(3)["sync/unproven"] == 1
    assert "did not receive body" in notes[-1]


def test_a_generator_that_refuses_a_part_is_sent_all_once_more_and_never_used_with_it(made, monkeypatch):
    _, _, generator, sync, notes = made
    complete = generator.end_load
    refusals = iter(["no head came"])

    def end_load():
        for refusal in refusals:
            raise SyncError(refusal)
        return complete()

    monkeypatch.setattr(generator, "end_load", end_load)
    assert sync(check="retry").push(1)["sync/attempts"] == 2
    assert "no head came" in notes[-1]
    for check in ("fail", "warn"):
        refusals = iter(["no head came"])
        with pytest.raises(SyncError, match="no head came") as raised:
            sync(check=check).push(2)
        assert "cannot continue with only some" in str(raised.value)


def test_a_version_that_was_not_asked_for_is_refused(made, monkeypatch):
    _, _, generator, sync, _ = made
    monkeypatch.setattr(generator, "end_load", lambda: [Proof(7, received=generator.got)])
    with pytest.raises(SyncError, match="reports version 7"):
        sync().push(1)


def test_a_replaced_engine_gets_the_current_weights(made):
    trainer, _, generator, sync, _ = made
    weights = sync()
    weights.push(4)
    generator.held = {}
    weights.refresh()
    assert generator.version == 4
    assert torch.equal(generator.held["head"], trainer.live["head"])


def test_phases_give_memory_to_roles_and_generator_in_turn(made):
    trainer, group, generator, _, _ = made
    trained = Role(ModelSpec(RoleSpec("policy", trained=True), "m"), group, 1)
    frozen_trainer = Bigram()
    frozen = Role(ModelSpec(RoleSpec("reference"), "m"), Local(frozen_trainer), 1)
    order = trainer.calls = generator.calls
    base = Role(ModelSpec(RoleSpec("base"), "m"), group, 1, view="base")
    gone = PrecomputedRole(ModelSpec(RoleSpec("gone"), "m"), ValueTable())
    roles = {"policy": trained, "reference": frozen, "base": base, "gone": gone}
    everywhere = {"policy": Place(), "reference": Place(), "generator": Place()}
    split_phases = Phases(generator, roles, everywhere, lambda: order.append("refresh"))
    with split_phases.generating():
        pass
    assert order == []
    places = {"policy": Place(), "reference": Place(share="policy"), "generator": Place(share="policy")}
    places["base"] = places["gone"] = Place(share="policy")
    phases = Phases(generator, roles, places, lambda: order.append("refresh"))
    with suppress(KeyError), phases.generating():
        order.append("generate")
        raise KeyError
    assert order == ["sleep", "offload", "wake", "generate", "sleep", "reload"]
    assert frozen_trainer.calls == ["offload", "reload"], "it may keep memory that it does not use"
    order.clear()
    phases.begin_sync()  # new weights find room, and stay for what is generated next
    order.append("sync")
    with phases.generating():
        order.append("generate")
    phases.begin_learning()
    assert order == ["offload", "sync", "wake", "generate", "sleep", "reload"]
    order.clear()
    phases.begin_sync()
    phases.begin_learning()
    phases.begin_learning()
    assert order == ["offload", "sleep", "reload"], "also where nothing is generated in between"
    order.clear()
    with phases.stay_awake():  # the batches of a round
        for _ in range(2):
            with phases.generating():
                order.append("generate")
    assert order == ["offload", "wake", "generate", "wake", "generate", "sleep", "reload"]
    order.clear()
    with phases.stay_awake():  # inside a round there is nothing to generate
        pass
    assert order == []
    generator.discards = True
    with phases.generating():
        order.append("generate")
    assert order == ["offload", "wake", "refresh", "generate", "sleep", "reload"]


@pytest.mark.parametrize("phase", ["generating", "stay_awake"])
def test_the_first_error_of_a_phase_is_raised_and_other_roles_reload(made, monkeypatch, phase):
    """A generator that stalls, say: the roles beside it are to save what was learnt."""
    trainer, group, generator, _, _ = made
    frozen_trainer = Bigram()
    roles = {
        "reference": Role(ModelSpec(RoleSpec("reference"), "m"), Local(frozen_trainer), 1),
        "policy": Role(ModelSpec(RoleSpec("policy", trained=True), "m"), group, 1),
    }
    places = {"policy": Place(), "reference": Place(share="policy"), "generator": Place(share="policy")}
    phases = Phases(generator, roles, places, lambda: None)

    def gone():
        raise WorkerError("nobody here")

    monkeypatch.setattr(generator, "sleep", gone)
    monkeypatch.setattr(frozen_trainer, "reload", gone)

    def stalls():
        with getattr(phases, phase)():
            phases.begin_sync()
            raise WorkerError("the generator stalled")

    with pytest.raises(WorkerError, match="stalled"):
        stalls()
    assert trainer.calls == ["offload", "reload"]
    phases.begin_learning()  # before it is saved: nothing is left to do
    assert trainer.calls == ["offload", "reload"]
    with pytest.raises(WorkerError, match="nobody here"), phases.generating():
        pass
    assert trainer.calls == ["offload", "reload"] * 2


def test_a_generator_that_takes_no_weights_is_refused(made):
    """Otherwise it would go on with old weights."""

    class Untyped(Generator):
        name = "untyped"

        def __init__(self):
            self.version = 0

        def begin_load(self, version):
            raise AssertionError

    _, _, _, sync, _ = made
    pushing = sync()
    pushing.generator = Untyped()
    with pytest.raises(CapabilityError, match=r"'untyped' .*TakesTensors"):
        pushing.push(1)


def test_the_trainer_computes_while_the_generator_prepares(made, monkeypatch):
    """What it begins is begun before the end of the load, and asked for afterwards."""
    _, group, generator, sync, _ = made
    order = []

    def begin(method, per_rank):
        order.append(f"begin {method}")
        return lambda: order.append(f"ask {method}") or group.call(method, per_rank)

    monkeypatch.setattr(group, "begin", begin)
    for method in ("take", "end_load", "logprobs"):
        call = partial(lambda name, call, *args: order.append(name) or call(*args), method, getattr(generator, method))
        monkeypatch.setattr(generator, method, call)
    sync().push(1)
    calls = "take, begin sent_fingerprints, begin forward, end_load, ask sent_fingerprints, logprobs, ask forward"
    assert ", ".join(order) == calls
