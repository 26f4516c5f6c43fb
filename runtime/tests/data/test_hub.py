"""Data and models of a hub through the real clients, which ask a hub on the loopback."""

from __future__ import annotations

import io
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from rlhf.errors import ModelError
from rlhf_hub.hub import HubName, hub_name
from rlhf_hub.published import model_folder
from rlhf_runtime.config.data_section import SourceSection

from tests.support.hub import LoopbackHub

pytestmark = pytest.mark.slow  # the clients are started in processes of their own

TOKEN = "hf_" + "Zq7" * 12
CARD = """---
configs:
- config_name: main
  data_files:
  - {split: train, path: "main/train-*"}
  - {split: test, path: main/test.jsonl}
- config_name: more
  data_files: more/*.jsonl
---
"""
ODD = """---
configs:
- config_name: default
  data_files: odd.csv
  sep: ";"
  skiprows: 1
---
"""
FORMS = {
    "sep": {"sep": ";"},
    "delimiter": {"delimiter": "\t"},
    "names": {"sep": "|", "column_names": ["a", "b"]},
    "no-header": {"header": None, "column_names": ["a", "b"]},
    "other-names": {"header": 0, "names": ["a", "b"]},
    "header": {"header": 0, "sep": ";"},
}
"""Options of a card that say how its csv is written."""
ODD_FORMS = [
    {"sep": "\\s+"}, {"header": None}, {"header": 1}, {"sep": ";", "decimal": ","}, {"column_names": ["a", 2]},
    {"column_names": ["a"]}, {"column_names": ["a", "a"]},
]  # fmt: skip
CSV_TEXT = 'first{0}second\n"1{0}2"{0}007\n\n"two\nlines"{0}""\n{0}NA\n'
FIRST = [{"question": f"q{i}", "when": "2020-01-01", "n": [1, "a"]} for i in range(3)]
SECOND = [{"question": "q3\u2028é", "more": {"a": None}}]
INDEX = json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}})
PARTS = {"model.safetensors.index.json": INDEX, "model-1.safetensors": b"1", "model-2.safetensors": b"2"}
MODELS = {
    "tiny": {
        "config.json": '{"model_type": "llama"}', "tokenizer.json": "{}", "model.safetensors": b"w", "x.py": "1/0",
        "pytorch_model.bin": b"p", "original/consolidated.00.pth": b"p", "onnx/model.onnx": b"o",
    },
    "parts": {"config.json": "{}", **PARTS, "consolidated.safetensors": b"w"},
    "partial": {"config.json": "{}", "model.safetensors.index.json": INDEX},
    "pickled": {"config.json": "{}", "pytorch_model.bin": b"p"},
    "gguf": {"README.md": "", "tiny.gguf": b"GGUF"},
}  # fmt: skip


def lines(rows):
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def parquet(rows):
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), sink)
    return sink.getvalue()


def csv_card(options):
    """A card whose one subset has the file a.csv and these options."""
    return "---\n" + json.dumps({"configs": [{"config_name": "default", "data_files": "a.csv", **options}]}) + "\n---\n"


def csv_text(options):
    return CSV_TEXT.format(options.get("sep", options.get("delimiter", ",")))


@pytest.fixture(scope="module")
def hub():
    with LoopbackHub() as instance:
        instance.publish(
            "dataset",
            "owner/rows",
            {
                "README.md": CARD,
                "main/train-0.jsonl": lines(FIRST),
                "main/train-1.jsonl": lines(SECOND),
                "main/test.jsonl": lines([{"question": "held out"}]),
                "more/a.jsonl": lines([{"question": "more"}]),
                "notes.txt": "one\n",
            },
        )
        instance.publish("dataset", "owner/cells", {"test.csv": "question,answer\nq,007\n", "train.csv": "a\n1\n"})
        names = [f"data/train-0000{i}-of-00002.parquet" for i in range(2)]
        parts = [parquet([{"prompt": "p0"}, {"prompt": "p1"}]), parquet([{"prompt": "p2"}])]
        instance.publish("dataset", "owner/columns", dict(zip(names, parts, strict=True)))
        instance.publish("dataset", "owner/odd", {"README.md": ODD, "odd.csv": "a;b\n1;2\n"})
        instance.publish("dataset", "owner/notes", {"notes.txt": "one\n"})
        instance.publish("dataset", "owner/script", {"script.py": "1 / 0\n"})
        for files, ref in ((FIRST, "main"), (SECOND, "main"), ([*FIRST, *SECOND], "v1.0")):
            instance.publish("dataset", "owner/moved", {"data.jsonl": lines(files)}, ref=ref)
        for name, options in FORMS.items():
            instance.publish("dataset", f"owner/{name}", {"README.md": csv_card(options), "a.csv": csv_text(options)})
        for number, options in enumerate(ODD_FORMS):
            instance.publish("dataset", f"owner/odd-{number}", {"README.md": csv_card(options), "a.csv": "1,2\n3,4\n"})
        instance.publish("dataset", "owner/secret", {"a.jsonl": lines(FIRST)}, token=TOKEN)
        instance.publish("dataset", "owner/gated", {"a.jsonl": lines(FIRST)}, gated=True)
        for name, files in MODELS.items():
            instance.publish("model", f"owner/{name}", files)
        yield instance


class Client:
    """A user with a cache of its own."""

    def __init__(self, home: Path) -> None:
        self.home, self.printed = home, ""

    def ask(self, endpoint: str, *requests, **environment: str):
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
        done = subprocess.run(
            [sys.executable, str(Path(__file__).with_name("hub_script.py"))],
            input=json.dumps(requests),
            env={**clean, "HF_HOME": str(self.home), "HF_ENDPOINT": endpoint, **environment},
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        self.printed += done.stdout + done.stderr
        return json.loads(done.stdout)


@pytest.fixture
def client(tmp_path):
    return Client(tmp_path / "home")


def source(name="rows", **fields):
    return {"path": f"owner/{name}", **fields}


def model(name, **fields):
    return {"model": f"owner/{name}", **fields}


@pytest.fixture(scope="module")
def user(tmp_path_factory):
    return Client(tmp_path_factory.mktemp("user"))


@pytest.fixture(scope="module")
def answers(hub, user):
    """{what is asked: the answers}, of one process: its start takes longer than all requests."""
    old = next(iter(hub.repositories["dataset", "owner/moved"].commits))
    secret = source("secret")
    requests = {
        "rows": [
            source(subset="main"), source(subset="main", max_rows=2), source("cells", split="test"),
            source("columns") | {"name": "mine"},
        ],
        "missing": [
            source(), source(subset="mian"), source(subset="main", split="tets"), source("odd"), source("notes"),
            source("script"), source("rows@v9", subset="main"), source("none"),
        ],
        "csv": [source(name) for name in FORMS],
        "odd csv": [source(f"odd-{number}") for number in range(len(ODD_FORMS))],
        "revisions": [
            source("moved"), source("moved@v1.0"), source(f"moved@{old}"),
            source("moved", pins={"dataset owner/moved@main": old}),
        ],
        "tokens": [
            secret, {**secret, "token": TOKEN + "x"}, source("gated", token=TOKEN), {**secret, "token": TOKEN},
        ],
        "models": [
            model("tiny"), model("tiny", weights=True), model("tiny", code=True), model("parts", weights=True),
            model("partial", weights=True), model("pickled", weights=True), model("gguf", weights=True),
            model("tinny"),
        ],
    }  # fmt: skip
    every = iter(user.ask(hub.url, *(request for group in requests.values() for request in group)))
    return {name: [next(every) for _ in group] for name, group in requests.items()}


def test_names():
    assert hub_name("owner/name") == HubName("owner/name", "main")
    assert hub_name("gpt2@v1.0") == HubName("gpt2", "v1.0")
    assert hub_name("owner/name@refs/pr/1") == HubName("owner/name", "refs/pr/1")
    assert [hub_name(p) for p in ("/a/b", "./a", "~/a", "a/b/c", "a b", "../a/b")] == [None] * 6
    assert hub_name(str(Path(__file__).parent)) is None
    assert SourceSection(path="owner/name.v2@v1.0").label == "name.v2"
    assert SourceSection(path="owner/name").label == "name"


def test_rows_are_those_of_the_files_whatever_their_kind(hub, answers):
    train, few, test, columns = answers["rows"]
    commit = hub.repositories["dataset", "owner/rows"].refs["main"]
    assert train["rows"] == [*FIRST, *SECOND]  # a date stays text, a list of two kinds a list, an absent key absent
    assert train["columns"] == ["question", "when", "n", "more"]
    assert train["where"][2:] == [
        f"owner/rows@{commit[:7]}/main/train-0.jsonl, line 3",
        f"owner/rows@{commit[:7]}/main/train-1.jsonl, line 1",
    ]
    assert train["name"] == "rows"
    assert train["pins"] == {"dataset owner/rows@main": commit}
    assert few["rows"] == FIRST[:2]
    assert few["fingerprint"] != train["fingerprint"]
    assert test["rows"] == [{"question": "q", "answer": "007"}]  # a csv cell is text, here too
    assert [row["prompt"] for row in columns["rows"]] == ["p0", "p1", "p2"]
    assert columns["name"] == "mine"
    assert columns["where"][2] == (
        f"owner/columns@{columns['pins']['dataset owner/columns@main'][:7]}/data/train-00001-of-00002.parquet, row 0"
    )
    assert not hub.asked("*/resolve/*/notes.txt") + hub.asked("*/resolve/*/test.jsonl")  # nothing else is loaded


def test_missing_names_on_the_hub_are_reported(hub, answers):
    choice, subset, split, odd, notes, script, revision, none = (answer["error"] for answer in answers["missing"])
    assert "the dataset owner/rows@main of the hub, subset None: Config name is missing. Please pick one" in choice
    assert "['main', 'more']" in choice
    assert "BuilderConfig 'mian' not found. Available: ['main', 'more']" in subset
    assert "has no split 'tets'; it has train, test. Did you mean 'test'?" in split
    assert "must be read with sep = ';', skiprows = 1, which is not supported here" in odd
    assert "has files like 'notes.txt'; allowed are jsonl, json, csv, parquet, arrow" in notes
    assert "the dataset owner/script@main of the hub, subset None: " in script
    assert (
        f"the dataset 'owner/rows', revision 'v9', of the hub {hub.url}: this branch, tag or commit does not exist. "
        "Use one that exists: owner/rows@REVISION."
    ) in revision
    assert none == (
        "DataError: no local file or folder owner/none exists, so it is taken as a hub name; the dataset "
        f"'owner/none', revision 'main', of the hub {hub.url} does not exist or is private (no token was sent). "
        "Correct the name, or set HF_TOKEN to your token, if it is private."
    )


def test_a_card_may_define_the_form_of_csv(answers):
    """The rows are those that pandas, which `datasets` reads csv with, makes of the options, all cells being text."""
    import pandas as pd

    for (name, options), answer in zip(FORMS.items(), answers["csv"], strict=True):
        names = {"names": options["column_names"]} if "column_names" in options else {}
        settings = {k: v for k, v in options.items() if k != "column_names"}
        frame = pd.read_csv(io.StringIO(csv_text(options)), dtype=str, keep_default_na=False, **names, **settings)
        assert answer.get("rows") == frame.to_dict("records"), (name, answer)
    places = [answer["where"][0].rpartition(", ")[2] for answer in answers["csv"]]
    assert places == ["line 2", "line 2", "line 1", "line 1", "line 2", "line 2"]
    prints = {name: answer["fingerprint"] for name, answer in zip(FORMS, answers["csv"], strict=True)}
    assert prints["no-header"] != prints["other-names"], "equal files, other rows"


def test_other_forms_of_csv_are_refused(answers):
    *errors, few, duplicate = (answer["error"] for answer in answers["odd csv"])
    assert ["must be read with" in error for error in errors] == [True] * (len(ODD_FORMS) - 2), errors
    assert "a.csv, line 1: 2 cells, but the dataset's card names 1: a" in few
    assert "the dataset's card names 'a' twice" in duplicate


def test_revisions_and_the_commits_that_a_run_recorded(hub, answers):
    old, new, _ = hub.repositories["dataset", "owner/moved"].commits
    head, tag, by_commit, resumed = answers["revisions"]
    assert (head["rows"], head["pins"]) == (SECOND, {"dataset owner/moved@main": new})
    assert tag["rows"] == [*FIRST, *SECOND]
    assert by_commit["rows"] == resumed["rows"] == FIRST
    assert resumed["pins"] == {"dataset owner/moved@main": old}
    assert resumed["fingerprint"] == by_commit["fingerprint"]


def test_private_and_gated_need_a_token_that_is_never_shown(answers, user):
    none, wrong, barred, right = answers["tokens"]
    assert "does not exist or is private (no token was sent)" in none["error"]
    note = "(the token of HF_TOKEN or `hf auth login` was sent). Correct the name, or set HF_TOKEN to a token that"
    assert note in wrong["error"]
    assert "is open only to users whom its owner accepts" in barred["error"]
    assert right["rows"] == FIRST
    assert TOKEN not in user.printed
    assert not [p for p in user.home.rglob("*") if p.is_file() and TOKEN.encode() in p.read_bytes()]


def test_without_an_answer_of_the_hub_the_cache_is_used_and_reported(hub, client, monkeypatch):
    (reference,) = client.ask(hub.url, source(subset="main"))
    count = len(hub.requests)
    hit, miss, none = client.ask(
        hub.url, source(subset="main"), source(subset="more"), source("none"), HF_HUB_OFFLINE="1"
    )
    assert len(hub.requests) == count
    assert (hit["rows"], hit["fingerprint"], hit["notes"]) == (reference["rows"], reference["fingerprint"], [])
    assert "HF_HUB_OFFLINE forbids its download" in none["error"]
    assert "the dataset 'owner/rows', revision 'main'" in miss["error"]
    dead = "http://127.0.0.1:9"  # the discard port: refused
    fallback, none = client.ask(dead, source(subset="main"), source("none"))
    assert fallback["rows"] == reference["rows"]
    assert "the hub cannot be reached: dataset owner/rows@main is assumed to be" in fallback["notes"][0]
    assert f"the dataset 'owner/none', revision 'main', of the hub {dead} could not be read: " in none["error"]
    assert "Check the network, HF_ENDPOINT and proxies, or use a folder or file." in none["error"]
    for status in (429, 503):
        monkeypatch.setattr(hub, "status", status)
        fallback, none = client.ask(hub.url, source(subset="main"), source("none"))
        assert fallback["rows"] == reference["rows"]
        assert f"the hub answers {status}: dataset owner/rows@main is assumed to be" in fallback["notes"][0]
        assert "Try again later." in none["error"]


def test_a_hub_that_does_not_answer_times_out(client):
    """What is asked first, the commit, is asked with the client's own limit for such questions."""
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections and says nothing
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        (none,) = client.ask(endpoint, {"model": "owner/tiny"}, HF_HUB_ETAG_TIMEOUT="1")
    assert "the model 'owner/tiny', revision 'main'" in none["error"]
    assert "could not be read: ReadTimeout" in none["error"]


def test_models_are_pinned_and_only_what_is_needed_is_loaded(hub, answers):
    light, full, coded, divided, partial, pickled, gguf, none = answers["models"]
    old = hub.repositories["model", "owner/tiny"].refs["main"]
    assert light["path"] == f"owner/tiny@{old}"
    assert light["pins"] == {"model owner/tiny@main": old}
    assert Path(full["folder"]).name == old
    file_names = [p.rsplit("/", 1)[1] for p in hub.asked("/owner/tiny/*") if p.startswith("GET")]
    assert sorted(file_names[:-1]) == ["config.json", "model.safetensors", "tokenizer.json"]  # each once
    assert file_names[-1] == "x.py"  # only for who runs code that comes with a model
    assert coded["folder"] == full["folder"]
    assert not hub.asked("*consolidated*")
    assert sorted(p.name for p in Path(divided["folder"]).iterdir()) == ["config.json", *sorted(PARTS)]
    assert "the model owner/partial@" in partial["error"]
    assert "has no model-1.safetensors: neither the cache" in partial["error"]
    assert "owner/pickled@" in pickled["error"]
    assert "has its weights only in pytorch_model.bin, which rlhf does not read" in pickled["error"]
    for error, name in ((pickled["error"], "pickled"), (gguf["error"], "gguf")):
        assert f"`hf download owner/{name} --local-dir {name}`" in error
        assert "rlhf convert" in error
    assert not hub.asked("*/pytorch_model.bin") + hub.asked("*/tiny.gguf")
    assert "there is no folder owner/tinny here, so it is taken as a hub name; the model 'owner/tinny'" in none["error"]


def test_pickled_weights_of_a_folder_are_refused_too(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"p")
    assert model_folder(str(tmp_path)) == str(tmp_path)  # its tokenizer can be read
    with pytest.raises(
        ModelError, match=r"has its weights only in pytorch_model\.bin, which rlhf does not read: unpickling"
    ):
        model_folder(str(tmp_path), weights=True)
    (tmp_path / "model.safetensors").write_bytes(b"w")
    assert model_folder(str(tmp_path), weights=True) == str(tmp_path)
