"""``[placement]``: one place per role, and what cannot be is refused before anything starts."""

from __future__ import annotations

import pytest
from rlhf.errors import ConfigError
from rlhf.interfaces import GENERATOR, Place
from rlhf.interfaces.launcher import check_workers
from rlhf_runtime.config.components import dumped
from rlhf_runtime.config.placement import divided, neighbours, placement
from rlhf_runtime.config.sections import PlacementSection

ROLES = ["policy", "critic", "reference"]


def places(**sections):
    return placement({name: PlacementSection(**s) for name, s in sections.items()}, ROLES, generator=True)


def test_a_role_without_a_placement_has_one_rank_on_one_device():
    assert places() == {name: Place() for name in (*ROLES, "generator")}
    assert placement({}, ["policy"], generator=False) == {"policy": Place()}


def test_shared_devices_are_filled_where_ranks_are_not_set():
    layout = places(
        policy={"ranks": 8},
        critic={"share": "policy"},
        reference={"ranks": 2, "share": "policy"},
        generator={"devices": 2, "share": "policy"},
    )
    assert [layout[name].ranks for name in (*ROLES, "generator")] == [8, 8, 2, 4]
    wide = places(policy={"ranks": 2, "devices": 4}, critic={"share": "policy"}, generator={"share": "policy"})
    assert [wide[name].ranks for name in ("policy", "critic", "generator")] == [2, 2, 2]
    assert places(policy={"ranks": 8}, generator={"devices": 3, "share": "policy"})["generator"].ranks == 2
    message = r"1 ranks x 4 devices do not fit on the 2 ranks x 1 devices = 2 of 'policy'"
    with pytest.raises(ConfigError, match=message):
        places(policy={"ranks": 2}, generator={"devices": 4, "share": "policy"})


def test_the_written_config_of_a_run_gives_the_same_places():
    """It has the default of every field."""
    sections = {
        "policy": PlacementSection(ranks=2, devices=2),
        "critic": PlacementSection(share="policy"),
        "generator": PlacementSection(share="policy"),
    }
    complete_sections = {name: PlacementSection(**dumped(section)) for name, section in sections.items()}
    assert "devices" in complete_sections["critic"].model_fields_set
    assert placement(complete_sections, ROLES, generator=True) == placement(sections, ROLES, generator=True)


def test_neighbours_are_on_the_same_devices():
    layout = places(
        policy={"ranks": 4}, critic={"ranks": 4, "share": "policy"}, generator={"ranks": 2, "share": "policy"}
    )
    assert layout["generator"] == Place(2, 1, "policy")
    assert neighbours(layout, "generator") == ["policy", "critic"]
    assert neighbours(layout, "policy") == ["critic", "generator"]
    assert neighbours(layout, "reference") == []


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"polcy": {}}, r"\[placement.polcy\]: this run has only policy.*Did you mean 'policy'"),
        ({"critic": {"share": "critic"}}, "it can only share those of policy, reference, generator"),
        ({"critic": {"share": "judge"}}, "shares the devices of 'judge'"),
        ({"critic": {"share": "reference"}, "reference": {"share": "policy"}}, "name 'policy' itself in both"),
        ({"critic": {"share": "policy", "devices": 2}}, "only one of share and devices"),
        (
            {"policy": {"ranks": 2}, "generator": {"ranks": 2, "devices": 2, "share": "policy"}},
            r"2 ranks x 2 devices do not fit on the 2 ranks x 1 devices = 2 of 'policy'",
        ),
    ],
)
def test_impossible_placements_are_refused(sections, message):
    with pytest.raises(ConfigError, match=message):
        places(**sections)


def test_an_engine_has_a_device_for_each_of_its_workers():
    four = (2, 2)
    assert divided(Place(3, 4, "policy"), "engines", four) == Place(3, 4, "policy", workers=4)
    assert divided(Place(), "engines", (1, 1)) == Place(workers=1)
    with pytest.raises(ConfigError) as info:
        divided(Place(3, 2), "engines", four)
    for part in (
        "generator 'engines' divides an engine over tensor_parallel x pipeline_parallel = 2 x 2 = 4 workers",
        "an engine has devices = 2",
        "Set placement.generator.devices = 4, or lower the generator's parallel sizes",
    ):
        assert part in str(info.value)


def test_idle_gpus_of_an_engine_are_refused_and_idle_cores_are_not():
    idle = {"policy": Place(1, 4), GENERATOR: Place(1, 4, workers=2)}
    check_workers(idle, "cpu")
    with pytest.raises(
        ConfigError, match=r"4 GPUs but only 2 workers .*, so 2 GPUs would be idle\. Set .*devices = 2,"
    ):
        check_workers(idle, "cuda")
    check_workers({"policy": Place(1, 4), GENERATOR: Place(1, 4, workers=4)}, "cuda")
    check_workers({"policy": Place(1, 4), GENERATOR: Place(1, 4)}, "cuda")
    check_workers({"policy": Place(1, 4)}, "cuda")
