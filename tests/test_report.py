"""`rlhf report`, and the page that a run writes at its end. A real browser opens pages where chromium is installed."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
import sys
from base64 import b64decode
from pathlib import Path
from typing import Any

import pytest
import rlhf
from rlhf.errors import ConfigError
from rlhf.types import Group, RewardResult, Row, Trajectory, Turn
from rlhf_runtime.checkpoint.saved_groups import write_groups, write_lines
from rlhf_runtime.data.image_files import image_size
from rlhf_runtime.report.page import SAMPLES, report
from rlhf_testing.image_models import drawing, tiny_image_model

from tests.runs import REWARD, Finished, Workshop
from tests.test_image_runs import SHOWS

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--enable-logging=stderr",
    "--virtual-time-budget=5000",
]  # fmt: skip
MARKUP = "</script><img src=x onerror=\"document.title='taken'\"><!--<script>"
FAILS = """
async def score(prompt, completion, row):
    if {when}:
        raise ValueError("no such <b>row</b>")
    return len(set(completion)) / 6
"""


@pytest.fixture(scope="module")
def shop(tiny: Workshop, tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("reports"), tiny.model, tiny.data)


@pytest.fixture(scope="module")
def whole(shop: Workshop) -> Finished:
    return shop.train(
        "ppo",
        "whole",
        run={"steps": 4, "timeline": 2, "name": f"whole {MARKUP}"},
        algorithm={"use": "ppo", "epochs": 2, "kl": {"coef": 0.05}},
        reward=[{"use": f"file:{shop.file('reward.py', REWARD)}"}, {"use": "length", "high": 4, "name": "short"}],
        data={"eval": [{"path": str(shop.data), "max_rows": 3}]},
        eval={"every": 2},
    )


@pytest.fixture(scope="module")
def offline(shop: Workshop) -> Finished:
    return shop.train("dpo", "offline", trainer={"lr": 1e-2})


def values(page: Path) -> dict[str, Any]:
    """The data of a page."""
    (text,) = re.findall(
        r'<script type="application/json" id="data">(.*?)</script>', page.read_text("utf-8"), re.DOTALL
    )
    return json.loads(text)


def copied(run: Finished, target: Path) -> Path:
    shutil.copytree(run.path, target, ignore=shutil.ignore_patterns("checkpoints", "report.html"))
    return target


def page_of(shop: Workshop, *runs: Path, target: Path) -> dict[str, Any]:
    done = shop.command("report", *map(str, runs), "-o", str(target))
    assert (done.code, done.out) == (0, f"report: {target}\n"), done.said
    return values(target)


# --------------------------------------------------------------------------------------- what is there


def test_a_run_writes_its_page_and_names_it_in_its_last_line(whole: Finished) -> None:
    assert whole.out.splitlines()[-1] == f"report: {whole.path / 'report.html'}"
    (run,) = values(whole.path / "report.html")["runs"]
    assert (run["state"], run["steps"], run["total_steps"], run["problems"]) == ("finished", 4, 4, [])
    lines = whole.lines()
    assert run["curves"]["steps"] == [1, 2, 3, 4]
    assert {*run["curves"]["metrics"]} >= {name for line in lines for name in line} - {"step"}
    assert run["curves"]["metrics"]["reward/mean"] == pytest.approx([line["reward/mean"] for line in lines], rel=1e-5)
    assert [value is None for value in run["curves"]["metrics"]["eval/reward"]] == [True, False, True, False]
    assert ["reward", "length", "rlhf-plugin-length 0.1.0"] in run["plugins"]
    assert run["options_changed"]["algorithm.kl.coef"] == "0.05"
    assert "run.seed" in run["options"]
    assert {track[0] for track in run["timeline"]["tracks"]} == {"driver", "samples", "rewards", "events"}


def test_samples_have_rewards_advantages_and_log_probs_of_their_tokens(whole: Finished) -> None:
    data = values(whole.path / "report.html")
    section = data["runs"][0]["samples"]
    training = [sample for sample in section["samples"] if sample["kind"] == "training"]
    assert len(training) == section["total"] == len([*whole.samples()])
    for sample, recorded in zip(training, whole.samples(), strict=True):
        (turn,) = sample["turns"]
        assert turn["ids"] == recorded["turns"][1]["ids"]
        assert turn["logprobs"] == pytest.approx(recorded["turns"][1]["logprobs"], rel=1e-6)
        names = {"policy/logprobs", "reference/logprobs", "critic/values", "advantages"}
        assert {name: len(v) for name, v in sample["values"].items()} == dict.fromkeys(names, len(turn["ids"]))
        assert {*sample["rewards"]} == {"reward", "short"}
        assert data["prompts"][sample["prompt"]] == {"text": recorded["prompt"], "images": []}
    assert section["note"] == ""
    answers = [sample for sample in section["samples"] if sample["kind"] == "evaluation"]
    assert [(s["step"], s["row"]) for s in answers] == [(step, row) for step in (2, 4) for row in range(3)]
    text = "".join(section["texts"][str(token)] for token in training[0]["turns"][0]["ids"])
    assert text == training[0]["turns"][0]["text"]


def test_several_runs_are_on_one_page(whole: Finished, offline: Finished, shop: Workshop, tmp_path: Path) -> None:
    data = page_of(shop, whole.path, offline.path, target=tmp_path / "both.html")
    assert [run["algorithm"] for run in data["runs"]] == ["ppo", "dpo"]
    assert [bool(run["samples"]["samples"]) for run in data["runs"]] == [True, False]
    failure = shop.command("report", str(whole.path), str(whole.path))
    assert (failure.code, "named twice" in failure.err) == (2, True)


def test_a_run_that_goes_on_is_shown(shop: Workshop, tmp_path: Path) -> None:
    page, states = tmp_path / "page.html", []

    def look(step: int, metrics: Any, control: Any) -> None:
        report([tmp_path / "run"], page)
        (facts,) = values(page)["runs"]
        states.append((facts["state"], facts["steps"], facts["total_steps"], facts["samples"]["total"]))
        assert facts["samples"]["note"].startswith("The log-probs of the policy are not recorded"), "of one step"

    options = {
        "sampling.samples_per_prompt": 2,
        "sampling.max_new_tokens": 4,
        "data.batch_size": 2,
        "run.report": False,
    }
    source = {
        "model": str(shop.model),
        "data": str(shop.data),
        "reward": lambda prompt, completion, row: len(completion),
    }
    rlhf.train("rloo", steps=2, output=tmp_path / "run", observers=[look], options=options, **source)
    assert states == [("running", 1, 2, 4), ("running", 2, 2, 8)]


def test_the_page_can_be_switched_off_and_its_option_may_change(shop: Workshop) -> None:
    run = shop.train("sft", "without", run={"steps": 2, "stop_after": 1, "report": False}, checkpoint={"every": 1})
    assert run.out.splitlines()[-1].startswith("stopped: ")
    assert not (run.path / "report.html").exists()
    changes = {"steps": 2, "resume": True}
    assert "another run" not in shop.train("sft", "without", run=changes, checkpoint={"every": 1}).said
    assert (run.path / "report.html").exists()


def test_a_failed_run_writes_its_page_too(shop: Workshop) -> None:
    run = shop.run("rloo", "failed", reward=[{"use": f"file:{shop.file('fails.py', FAILS.format(when=True))}"}])
    assert run.code != 0
    page = run.path / "report.html"
    assert f"note: {page} shows the run" in run.said
    (facts,) = values(page)["runs"]
    assert facts["state"] == "failed"
    assert "no such <b>row</b>" in facts["why"]


def test_what_was_left_out_is_counted_with_its_reason(shop: Workshop) -> None:
    reward = shop.file("some_fail.py", FAILS.format(when='row["answer"] in "24"'))
    run = shop.train(
        "rloo",
        "some",
        reward=[{"use": f"file:{reward}"}],
        stream={"max_failed": 1.0, "on_failed_sample": "drop_sample"},
    )
    (facts,) = values(run.path / "report.html")["runs"]
    counts = {name: count for name, count, _ in facts["left_out"]}
    assert counts["stream/failed_samples"] == sum(line["stream/failed_samples"] for line in run.lines()) > 0
    assert any("no such <b>row</b>" in note for note in facts["notes"])


# ------------------------------------------------------------------------------- what is not a good run


def test_a_page_that_cannot_be_written_is_a_note(shop: Workshop) -> None:
    folder = shop.folder / "occupied"
    folder.mkdir()
    (folder / "report.html").write_text("a page of mine")
    run = shop.train("sft", "occupied", run={"steps": 1})
    assert re.search(r"note: \S+report.html was not written: ConfigError: .* is not a report", run.said)
    assert (folder / "report.html").read_text() == "a page of mine"
    done = shop.command("report", str(run.path))
    assert (done.code, "Name another file" in done.err) == (2, True)


def test_no_run_and_no_place_are_errors(tmp_path: Path, whole: Finished) -> None:
    with pytest.raises(ConfigError, match="there is no folder"):
        report([tmp_path / "none"], tmp_path / "page.html")
    with pytest.raises(ConfigError, match="cannot be written"):
        report([whole.path], tmp_path / "none" / "page.html")


def damage(run: Path) -> None:
    """Everything that a page reads, damaged in its middle or at its end."""
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (run / "metrics.jsonl").write_bytes(lines[0] + b'{"step": 2, "rew\n' + lines[3] + lines[2] + lines[3][:40])
    (run / "manifest.json").write_text('{"starts": [{"plugins": 3, "ended": [], "environment": 5}]}')
    (run / "config.toml").write_text('[data]\ntrain = 5\n[policy]\nmodel = ["x"]\n[run]\nname = 7\n')
    timeline = (run / "timeline.json").read_text().splitlines()
    (run / "timeline.json").write_text("\n".join([*timeline[:8], '{"ph": "X", "pi', '{"ph": "X"},', timeline[8][:20]]))
    (run / "rollouts/step-000002.arrow").write_bytes(b"ARROW1")
    shutil.copy(run / "rollouts/step-000001.arrow", run / "rollouts/step-000009.arrow")
    with (run / "rollouts/step-000003.arrow").open("r+b") as file:
        file.seek(200)
        file.write(b"\xff" * 400)
    (run / "evaluations/step-000002.jsonl").write_text("{}\n")
    shutil.rmtree(run / "model")


def test_a_damaged_run_is_shown_as_far_as_it_can_be_read(whole: Finished, shop: Workshop, tmp_path: Path) -> None:
    run = copied(whole, tmp_path / "damaged")
    damage(run)
    (facts,) = page_of(shop, run, target=tmp_path / "damaged.html")["runs"]
    assert facts["curves"]["steps"] == [1, 4]
    assert {sample["step"] for sample in facts["samples"]["samples"]} >= {1, 4, 9}
    problems = "\n".join(facts["problems"])
    for name in ("metrics.jsonl", "timeline.json", "step-000002.arrow", "step-000002.jsonl", "tokens"):
        assert name in problems


@pytest.mark.parametrize("name", ["config.toml", "manifest.json", "metrics.jsonl", "rollouts", "evaluations"])
def test_a_run_without_one_of_its_files_is_shown(name: str, whole: Finished, shop: Workshop, tmp_path: Path) -> None:
    run = copied(whole, tmp_path / "run")
    shutil.rmtree(run / name) if (run / name).is_dir() else (run / name).unlink()
    (facts,) = page_of(shop, run, target=tmp_path / "page.html")["runs"]
    assert bool(facts["curves"]["metrics"]) == (name != "metrics.jsonl")
    assert bool(facts["samples"]["total"]) == (name != "rollouts")


# --------------------------------------------------------------------------------------------- a large run


def large(run: Path, model: Path, steps: int) -> Path:
    """A run with 100 samples of 200 tokens in each step, and 20 evaluations."""
    for name in ("rollouts", "evaluations"):
        (run / name).mkdir(parents=True)
    (run / "metrics.jsonl").write_text(
        "".join(
            json.dumps({"step": n, **{f"policy/{k}": n * k for k in range(60)}}) + "\n" for n in range(1, steps + 1)
        )
    )
    shutil.copytree(model, run / "model")

    def group(number: int, samples: int) -> Group:
        row = Row({}, "rows", number)
        turns = [
            Turn([5, 6], False, text=f"{number} and {MARKUP}? "),
            Turn([7] * 200, True, [-0.25] * 200, ((0, 0),), "stop", 1.0, text=MARKUP + " so 42." * 90),
        ]
        rewards = {"math": RewardResult(0.5)}
        trajectories = [Trajectory(row, turns, (number, n), rewards=rewards, reward=n / 3) for n in range(samples)]
        return Group(row, number, trajectories)

    groups = [group(number, 10) for number in range(10)]
    rest = {"policy/logprobs": [-0.5] * 200, "reference/logprobs": [-0.75] * 200, "advantages": [0.5]}
    of_tokens = {t.index: rest for g in groups for t in g.trajectories}
    write_groups(run / "rollouts/step-000001.arrow", groups, lambda t: t.prompt_text, of_tokens)
    for step in range(2, steps + 1):
        os.link(run / "rollouts/step-000001.arrow", run / f"rollouts/step-{step:06d}.arrow")
    write_lines(run / "evaluations/step-000050.jsonl", [group(number, 2) for number in range(200)], lambda t: "?")
    for step in range(100, steps + 1, 50):
        os.link(run / "evaluations/step-000050.jsonl", run / f"evaluations/step-{step:06d}.jsonl")
    return run


@pytest.mark.slow
def test_a_hundred_thousand_samples_fit_on_a_page(shop: Workshop, tmp_path: Path) -> None:
    run = large(tmp_path / "large", shop.model, 1000)
    page = tmp_path / "large.html"
    code = (
        "import sys; from rlhf.process_memory import peak_memory; from rlhf_cli.main import main; "
        "assert main(sys.argv[1:]) == 0; assert peak_memory()['process'] < 2**30"
    )
    subprocess.run([sys.executable, "-c", code, "report", str(run), "-o", str(page)], check=True, timeout=300)
    assert page.stat().st_size < 50e6
    section = values(page)["runs"][0]["samples"]
    assert (section["total"], section["shown"]) == (100_000, SAMPLES)
    assert {1, 1000} <= {sample["step"] for sample in section["samples"]}
    assert 0 < section["with_tokens"] < len(section["samples"])


# ------------------------------------------------------------------------------------------- in a browser


@pytest.fixture
def browse(tmp_path: Path):
    """``browse(page, script, width, dark)``: the page's DOM after the script, which may set ``document.title``."""
    if CHROMIUM is None:
        pytest.skip("no chromium is installed")

    def opened(page: Path, script: str, width: int = 1280, dark: bool = False) -> str:
        variant = tmp_path / "tried.html"
        watch = "<script>onerror = (text) => { document.title = `error: ${text}`; };</script>"
        text = page.read_text("utf-8").replace("<style>", f"{watch}<style>", 1)
        variant.write_text(text.replace("</body>", f"<script>setTimeout(() => {{ {script} }}, 1000)</script></body>"))
        scheme = ["--blink-settings=preferredColorScheme=0"] if dark else []
        flags = [f"--user-data-dir={tmp_path / 'browser'}", f"--window-size={width},2000", "--dump-dom"]
        done = subprocess.run(
            [CHROMIUM, *FLAGS, *scheme, *flags, f"file://{variant}"],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        assert [line for line in done.stderr.splitlines() if ":CONSOLE" in line] == []
        (title,) = re.findall("<title>(.*?)</title>", done.stdout, re.DOTALL)
        return html.unescape(title)

    return opened


LAYOUT = """
const plots = [], Plot = uPlot;
uPlot = new Proxy(Plot, { construct: (_, parts) => { plots.push(new Plot(...parts)); return plots.at(-1); } });
charts.forEach((one) => one.draw());
const times = plots.filter((plot) => plot.root.closest("#time"));
const wide = [...document.querySelectorAll("section, header, footer")].filter((e) => e.scrollWidth > innerWidth);
queueMicrotask(() => document.title = JSON.stringify({  // after those in which charts get their scales
  charts: document.querySelectorAll(".chart canvas").length,
  timeline: document.querySelectorAll("canvas.timeline").length,
  lowest: times.map((plot) => plot.scales.y.min), steps: plots.flatMap((plot) => plot.axes[0]._splits),
  rows: document.querySelectorAll(".rows tbody tr").length, wide: wide.map((e) => e.id),
  ground: getComputedStyle(document.body).backgroundColor, images: document.images.length,
  sections: [...document.querySelectorAll("section")].map((e) => e.id).join(" ") }));
"""


@pytest.mark.slow
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)], ids=["wide", "narrow and dark"])
def test_a_browser_shows_every_part(whole: Finished, browse, width: int, dark: bool) -> None:
    layout = json.loads(browse(whole.path / "report.html", LAYOUT, width, dark))
    assert layout["charts"] > 8
    assert layout["lowest"] == [0]
    assert all(step == round(step) for step in layout["steps"])
    assert (layout["timeline"], layout["wide"], layout["images"]) == (1, [], 0)
    assert layout["rows"] == len([*whole.samples()]) + 6
    assert layout["ground"] == ("rgb(20, 23, 26)" if dark else "rgb(255, 255, 255)")
    assert layout["sections"] == "curves time timeline samples compare evaluations left-out options plugins"


@pytest.fixture(scope="module")
def image_run(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A question about two images of one size, answered in two turns with an image between them."""
    folder = tmp_path_factory.mktemp("images")
    for colour in ("red", "blue"):
        (folder / f"{colour}.png").write_bytes(drawing(1000, 500, colour))
    shop = Workshop(folder, tiny_image_model(folder / "model", "qwen3_vl"), folder / "rows.jsonl")
    shop.rows(
        "rows.jsonl", [{"prompt": "c", "images": f"{colour}.png", "answer": colour} for colour in ("red", "blue")]
    )
    env = {"use": f"file:{shop.file('shows.py', SHOWS)}", "max_turns": 2}
    data = {"max_tokens": 1024, "batch_size": 2}
    return shop.train(
        "grpo", "images", rollout={"use": "multi_turn"}, env=env, reward=None, data=data, run={"steps": 2}
    )


def test_rows_with_one_text_and_different_images_are_different_prompts(image_run: Finished) -> None:
    data = values(image_run.path / "report.html")
    samples = data["runs"][0]["samples"]["samples"]
    assert {(sample["row"], sample["prompt"]) for sample in samples} in ({(0, 0), (1, 1)}, {(0, 1), (1, 0)})
    assert len({prompt["text"] for prompt in data["prompts"]}) == 1
    (first,), (second,) = (prompt["images"] for prompt in data["prompts"])
    answered = {turn["speaker"] for sample in samples for turn in sample["turns"] if "images" in turn}
    assert answered == {"environment"}
    sizes = [image_size(b64decode(url.removeprefix("data:image/jpeg;base64,"))) for url in data["images"]]
    assert (sizes[first], sizes[second]) == ((400, 200), (400, 200))
    assert data["images"][first] != data["images"][second]


def test_images_above_the_limit_are_named_by_their_size(image_run: Finished, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("rlhf_runtime.report.page.IMAGES", 1)
    report([image_run.path], tmp_path / "page.html")
    data = values(tmp_path / "page.html")
    assert [bool(url) for url in data["images"]] == [True] + [False] * (len(data["images"]) - 1)
    assert all("[image 1000x500]" in prompt["text"] for prompt in data["prompts"])


LOADED = """
const images = [...document.querySelectorAll("#samples .detail img")];
const kinds = images.map((image) => image.parentElement.parentElement.className);
document.title = JSON.stringify(images.map((image, n) => [image.naturalWidth, kinds[n]]));
"""


@pytest.mark.slow
def test_a_browser_shows_the_images_of_a_sample(image_run: Finished, browse) -> None:
    images = json.loads(browse(image_run.path / "report.html", LOADED))
    assert [400, "text-block"] in images
    assert any(place == "environment" for _, place in images)
    assert all(width for width, _ in images)


USE = """
const press = (element, key) =>
  element.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true }));
const rows = () => [...document.querySelectorAll(".rows tbody tr")];
const column = (n) => rows().map((row) => row.children[n].textContent);
const found = {};
const heads = [...document.querySelectorAll(".rows th button")];
heads.find((head) => head.textContent === "total reward").click();
found.sorted = column(2).map(Number);
press(rows()[0], "ArrowDown");
found.selected = rows().map((row) => row.getAttribute("aria-selected")).indexOf("true");
found.focused = document.activeElement === rows()[1];
const tokens = document.querySelector("#samples .tokens");
found.choices = [...document.querySelectorAll("#samples .detail option")].map((option) => option.textContent);
press(tokens, "ArrowRight");
found.readout = document.querySelector("#samples .readout").textContent;
const search = document.querySelector("#samples input[type=search]");
search.value = "nowhere to be seen";
search.dispatchEvent(new Event("input"));
found.none = rows().length;
search.value = "";
search.dispatchEvent(new Event("input"));
const kind = document.querySelector("#samples select");
kind.value = "evaluation";
kind.dispatchEvent(new Event("change"));
found.evaluations = rows().length;
document.querySelector("#evaluations td button").click();
found.compared = document.querySelector("#compare .two h3").textContent;
const chart = document.querySelector(".chart [tabindex]");
press(chart, "ArrowRight");
found.cursor = document.querySelector(".chart .now").textContent;
for (const box of document.querySelectorAll("#curves .bar input")) {
  if (box.type === "checkbox") box.checked = true; else if (box.type === "range") box.value = 0.9;
  box.dispatchEvent(new Event("change"));
}
document.querySelectorAll("details").forEach((one) => { one.open = true; });
press(document.querySelector("canvas.timeline"), "+");
found.heading = document.querySelector("h1").textContent;
document.title = JSON.stringify(found);
"""


@pytest.mark.slow
def test_the_page_works_by_keyboard_and_shows_markup_as_text(whole: Finished, browse) -> None:
    state = json.loads(browse(whole.path / "report.html", USE))
    assert state["sorted"] == sorted(state["sorted"], reverse=True)
    assert (state["selected"], state["focused"], state["none"], state["evaluations"]) == (1, True, 0, 6)
    assert {"advantages", "log-prob: generator", "policy \u2212 generator", "reference \u2212 policy"} <= {
        *state["choices"]
    }
    assert re.match(r"token 1 of \d, id \d+, .*generator -.*reference -", state["readout"])
    assert state["compared"].startswith("evaluation after step 2")
    assert state["cursor"].startswith("step 1:")
    assert state["heading"] == f"whole {MARKUP}"


def test_text_of_samples_never_ends_the_data(whole: Finished, shop: Workshop, tmp_path: Path) -> None:
    run = copied(whole, tmp_path / "run")
    row = Row({}, MARKUP, 0)
    turns = [Turn([1], False, text=MARKUP), Turn([5], True, [-0.5], ((0, 0),), "stop", text=f"{MARKUP}\ud83d\u2028")]
    rewards = {MARKUP: RewardResult(1.0, info={MARKUP: MARKUP})}
    failed = Trajectory(row, turns, (0, 0), "failed", rewards, reward=float("inf"), error=MARKUP)
    write_groups(run / "rollouts/step-000005.arrow", [Group(row, 0, [failed])], lambda t: MARKUP)
    write_groups(run / "rollouts/step-000006.arrow", [], lambda t: MARKUP)  # a step without anything to learn from
    data = page_of(shop, run, target=tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text("utf-8")
    assert (text.count("<script"), text.count("</script"), text.count("<img")) == (3, 3, 0)
    (sample,) = [sample for sample in data["runs"][0]["samples"]["samples"] if sample["step"] == 5]
    assert sample["turns"][0]["text"] == f"{MARKUP}\ud83d\u2028"
    assert (sample["error"], sample["reward"]) == (MARKUP, "inf")
