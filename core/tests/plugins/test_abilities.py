"""Trainers and generators whose optional methods nothing would call are refused with one message."""

from __future__ import annotations

import re

import pytest
from rlhf.errors import PluginInvalid
from rlhf.interfaces import (
    AnswersRequests,
    EnginePool,
    Generator,
    LendsHead,
    Sleeps,
    TakesModule,
    TakesTensors,
    Trainer,
    abilities,
)
from rlhf.plugins import Plugins
from rlhf.plugins.registration import check_class

OLD_TRAINER = """
from rlhf.interfaces import LendsHead, Trainer

class Old(LendsHead, Trainer):
    name = "old"
    capabilities = frozenset({"export:module", "export:tensors", "lend:head", "bf16"})
    def __init__(self, config, spec): ...
    def weights(self, view="live", every_rank=False): ...
    def load_weights(self, weights): ...
    def offload(self): ...
    def reload(self): ...
"""
"""A trainer as it was written before abilities were classes. What every trainer has is left out."""


class Complete(Generator):
    name = "complete"

    def __init__(self, config, spec): ...

    def generate(self, requests): ...


def refused(kind: str, cls: type) -> str:
    with pytest.raises(PluginInvalid) as info:
        check_class(kind, cls, f"{kind} {cls.name!r}")
    return str(info.value)


def test_a_trainer_of_the_old_interface_gets_all_bases_in_one_message(tmp_path):
    path = tmp_path / "old.py"
    path.write_text(OLD_TRAINER)
    with pytest.raises(PluginInvalid) as info:
        Plugins([]).resolve("trainer", f"file:{path}")
    message = str(info.value)
    for reason in (
        "SharesModule for 'export:module'",
        "SendsWeights for 'export:tensors' and weights()",
        "TakesWeights for load_weights()",
        "Offloads for offload() and reload()",
    ):
        assert reason in message
    assert "class Old(SharesModule, SendsWeights, TakesWeights, Offloads, LendsHead, Trainer)" in message
    assert "bf16" not in message


def test_a_generator_of_the_old_interface_gets_all_bases_and_what_to_remove_in_one_message():
    class Old(Complete):
        capabilities = frozenset({"accept:tensors", "answers", "logprobs"})

        def begin_load(self, version): ...

        def advance(self, requests, dropped=(), seconds=0.0): ...

        def wake(self): ...

        def pause(self): ...

        async def answer(self, request): ...

    message = refused("generator", Old)
    assert "class Old(TakesTensors, AnswersRequests, Sleeps, Complete)" in message
    assert "Sleeps for wake()" in message
    assert re.search(r"Remove answer\(\), pause\(\), .*EnginePool", message)


def test_a_capability_that_is_a_class_now_is_refused_without_the_class_only():
    class Declares(Complete):
        capabilities = frozenset({"accept:module"})

    class Both(TakesModule, Declares):
        def load(self, source, version): ...

    assert "class Declares(TakesModule, Complete)" in refused("generator", Declares)
    assert check_class("generator", Both, "") is Both


def test_a_missing_method_of_an_ability_is_named_with_the_ability():
    class Half(Sleeps, TakesTensors, Complete):
        def sleep(self): ...

    message = refused("generator", Half)
    assert "wake, which every Sleeps must have" in message
    assert "begin_load, end_load, take, which every TakesTensors must have" in message


def test_abilities_are_the_names_of_the_bases():
    class Several(AnswersRequests, TakesTensors, Complete): ...

    class Lends(LendsHead, Trainer): ...

    assert abilities(Complete) == []
    assert abilities(Several) == ["AnswersRequests", "TakesTensors"]
    assert abilities(Lends) == ["LendsHead"]
    assert abilities(EnginePool) == ["TakesTensors"]


@pytest.mark.parametrize(("interface", "limit"), [(Trainer, 14), (Generator, 12)])
def test_the_interfaces_stay_short(interface, limit):
    """What only some classes have, and what is asked before a run starts, has classes of its own."""
    methods = [name for name, value in vars(interface).items() if callable(value) and not name.startswith("_")]
    assert 0 < len(methods) <= limit
