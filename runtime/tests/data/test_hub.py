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
    "no header": {"header": None, "column_names": ["a", "b"]},
    "other names": {"header": 0, "names": ["a", "b"]},
    "header": {"header": 0, "sep": ";"},
}
"""Options of a card that say how its csv is written."""
CSV_TEXT = 'first{0}second\n"1{0}2"{0}007\n\n"two\nlines"{0}""\n{0}NA\n'
FIRST = [{"question": f"q{i}", "when": "2020-01-01", "n": [1, "a"]} for i in range(3)]
SECOND = [{"question": "q3\u2028é", "more": {"a": None}}]


def lines(rows):
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def parquet(rows):
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), sink)
    return sink.getvalue()


@pytest.fixture
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


def source(**fields):
    return {"path": "owner/rows", **fields}


def test_names():
    assert hub_name("owner/name") == HubName("owner/name", "main")
    assert hub_name("gpt2@v1.0") == HubName("gpt2", "v1.0")
    assert hub_name("owner/name@refs/pr/1") == HubName("owner/name", "refs/pr/1")
    assert [hub_name(p) for p in ("/a/b", "./a", "~/a", "a/b/c", "a b", "../a/b")] == [None] * 6
    assert hub_name(str(Path(__file__).parent)) is None
    assert SourceSection(path="owner/name.v2@v1.0").label == "name.v2"
    assert SourceSection(path="owner/name").label == "name"


def test_rows_are_those_of_the_files_whatever_their_kind(hub, client):
    train, few, test, columns = client.ask(
        hub.url, source(subset="main"), source(subset="main", max_rows=2), source(path="owner/cells", split="test"),
        source(path="owner/columns", name="mine"),
    )  # fmt: skip
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


def test_missing_names_on_the_hub_are_reported(hub, client):
    sources = [
        source(), source(subset="mian"), source(subset="main", split="tets"), source(path="owner/odd"),
        source(path="owner/notes"), source(path="owner/script"),
        source(path="owner/rows@v9", subset="main"), source(path="owner/none"),
    ]  # fmt: skip
    choice, subset, split, odd, notes, script, revision, none = (a["error"] for a in client.ask(hub.url, *sources))
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


def csv_card(options):
    """A card whose one subset has the file a.csv and these options."""
    return "---\n" + json.dumps({"configs": [{"config_name": "default", "data_files": "a.csv", **options}]}) + "\n---\n"


def test_a_card_may_define_the_form_of_csv(hub, client):
    """The rows are those that pandas, which `datasets` reads csv with, makes of the options, all cells being text."""
    import pandas as pd

    for name, options in FORMS.items():
        text = CSV_TEXT.format(options.get("sep", options.get("delimiter", ",")))
        hub.publish("dataset", f"owner/{name.replace(' ', '-')}", {"README.md": csv_card(options), "a.csv": text})
    answers = client.ask(hub.url, *(source(path=f"owner/{name.replace(' ', '-')}") for name in FORMS))
    for (name, options), answer in zip(FORMS.items(), answers, strict=True):
        names = {"names": options["column_names"]} if "column_names" in options else {}
        settings = {k: v for k, v in options.items() if k != "column_names"}
        text = CSV_TEXT.format(options.get("sep", options.get("delimiter", ",")))
        frame = pd.read_csv(io.StringIO(text), dtype=str, keep_default_na=False, **names, **settings)
        assert answer.get("rows") == frame.to_dict("records"), (name, answer)
    places = {name: answer["where"][0].rpartition(", ")[2] for name, answer in zip(FORMS, answers, strict=True)}
    assert (places["sep"], places["names"], places["no header"], places["other names"]) == (
        "line 2",
        "line 1",
        "line 1",
        "line 2",
    )
    prints = {name: answer["fingerprint"] for name, answer in zip(FORMS, answers, strict=True)}
    assert prints["no header"] != prints["other names"], "equal files, other rows"


@pytest.mark.full
def test_other_forms_of_csv_are_refused(hub, client):
    odd = [{"sep": "\\s+"}, {"header": None}, {"header": 1}, {"sep": ";", "decimal": ","}, {"column_names": ["a", 2]}]
    for number, options in enumerate(odd):
        hub.publish("dataset", f"owner/odd-{number}", {"README.md": csv_card(options), "a.csv": "1;2\n3;4\n"})
    for answer in client.ask(hub.url, *(source(path=f"owner/odd-{number}") for number in range(len(odd)))):
        assert "must be read with" in answer["error"], answer
    hub.publish("dataset", "owner/few", {"README.md": csv_card({"column_names": ["a"]}), "a.csv": "1,2\n"})
    hub.publish("dataset", "owner/twice", {"README.md": csv_card({"column_names": ["a", "a"]}), "a.csv": "1,2\n"})
    few, duplicate = (
        answer["error"] for answer in client.ask(hub.url, source(path="owner/few"), source(path="owner/twice"))
    )
    assert "a.csv, line 1: 2 cells, but the dataset's card names 1: a" in few
    assert "the dataset's card names 'a' twice" in duplicate


def test_revisions_and_the_commits_that_a_run_recorded(hub, client):
    old = hub.repositories["dataset", "owner/rows"].refs["main"]
    new = hub.publish("dataset", "owner/rows", {"data.jsonl": lines(SECOND)}, ref="main")
    hub.publish("dataset", "owner/rows", {"data.jsonl": lines(FIRST)}, ref="v1.0")
    head, tag, by_commit, resumed = client.ask(
        hub.url, source(), source(path="owner/rows@v1.0"), source(path=f"owner/rows@{old}", subset="main"),
        source(subset="main", pins={"dataset owner/rows@main": old}),
    )  # fmt: skip
    assert head["rows"] == SECOND
    assert head["pins"] == {"dataset owner/rows@main": new}
    assert tag["rows"] == FIRST
    assert by_commit["rows"] == resumed["rows"] == [*FIRST, *SECOND]
    assert resumed["pins"] == {"dataset owner/rows@main": old}
    assert resumed["fingerprint"] == by_commit["fingerprint"]


def test_private_and_gated_need_a_token_that_is_never_shown(hub, client):
    hub.publish("dataset", "owner/secret", {"a.jsonl": lines(FIRST)}, token=TOKEN)
    hub.publish("dataset", "owner/gated", {"a.jsonl": lines(FIRST)}, gated=True)
    private, gated = source(path="owner/secret"), source(path="owner/gated")
    assert "does not exist or is private (no token was sent)" in client.ask(hub.url, private)[0]["error"]
    wrong, barred = client.ask(hub.url, private, gated, HF_TOKEN=TOKEN + "x")
    assert (
        "(the token of HF_TOKEN or `hf auth login` was sent). Correct the name, or set HF_TOKEN to a token that"
        in (wrong["error"])
    )
    assert "is open only to users whom its owner accepts" in barred["error"]
    assert client.ask(hub.url, private, HF_TOKEN=TOKEN)[0]["rows"] == FIRST
    assert TOKEN not in client.printed
    assert not [p for p in client.home.rglob("*") if p.is_file() and TOKEN.encode() in p.read_bytes()]


def test_without_a_network_the_cache_is_used_and_reported(hub, client):
    (reference,) = client.ask(hub.url, source(subset="main"))
    count = len(hub.requests)
    hit, miss, none = client.ask(
        hub.url, source(subset="main"), source(subset="more"), source(path="owner/none"), HF_HUB_OFFLINE="1"
    )
    assert len(hub.requests) == count
    assert (hit["rows"], hit["fingerprint"], hit["notes"]) == (reference["rows"], reference["fingerprint"], [])
    assert "HF_HUB_OFFLINE forbids its download" in none["error"]
    assert "the dataset 'owner/rows', revision 'main'" in miss["error"]
    dead = "http://127.0.0.1:9"  # the discard port: refused
    fallback, none = client.ask(dead, source(subset="main"), source(path="owner/none"))
    assert fallback["rows"] == reference["rows"]
    assert "the hub cannot be reached: dataset owner/rows@main is assumed to be" in fallback["notes"][0]
    assert f"the dataset 'owner/none', revision 'main', of the hub {dead} could not be read: " in none["error"]
    assert "Check the network, HF_ENDPOINT and proxies, or use a folder or file." in none["error"]


@pytest.mark.parametrize("status", [429, 503])
def test_a_hub_out_of_service_leaves_the_cache_in_use(status, hub, client):
    (reference,) = client.ask(hub.url, source(subset="main"))
    hub.status = status
    fallback, none = client.ask(hub.url, source(subset="main"), source(path="owner/none"))
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


def test_models_are_pinned_and_only_what_is_needed_is_loaded(hub, client):
    files = {"config.json": '{"model_type": "llama"}', "tokenizer.json": "{}", "model.safetensors": b"w", "x.py": "1/0"}
    files |= {"pytorch_model.bin": b"p", "original/consolidated.00.pth": b"p", "onnx/model.onnx": b"o"}
    old = hub.publish("model", "owner/tiny", files)
    index = json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}})
    parts = {"model.safetensors.index.json": index, "model-1.safetensors": b"1", "model-2.safetensors": b"2"}
    hub.publish("model", "owner/parts", {"config.json": "{}", **parts, "consolidated.safetensors": b"w"})
    hub.publish("model", "owner/partial", {"config.json": "{}", "model.safetensors.index.json": index})
    hub.publish("model", "owner/pickled", {"config.json": "{}", "pytorch_model.bin": b"p"})
    hub.publish("model", "owner/gguf", {"README.md": "", "tiny.gguf": b"GGUF"})
    light, full, coded, divided, partial, pickled, gguf, none = client.ask(
        hub.url, {"model": "owner/tiny"}, {"model": "owner/tiny", "weights": True},
        {"model": "owner/tiny", "code": True}, {"model": "owner/parts", "weights": True},
        {"model": "owner/partial", "weights": True},
        {"model": "owner/pickled", "weights": True}, {"model": "owner/gguf", "weights": True}, {"model": "owner/tinny"},
    )  # fmt: skip
    assert light["path"] == f"owner/tiny@{old}"
    assert light["pins"] == {"model owner/tiny@main": old}
    assert Path(full["folder"]).name == old
    file_names = [p.rsplit("/", 1)[1] for p in hub.asked("/owner/tiny/*") if p.startswith("GET")]
    assert sorted(file_names[:-1]) == ["config.json", "model.safetensors", "tokenizer.json"]  # each once
    assert file_names[-1] == "x.py"  # only for who runs code that comes with a model
    assert coded["folder"] == full["folder"]
    assert not hub.asked("*consolidated*")
    assert sorted(p.name for p in Path(divided["folder"]).iterdir()) == ["config.json", *sorted(parts)]
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
