"""Tokenizers made on the spot: characters with and without a chat template, and byte pairs that merge across words.
Rows of a file as the data of a run."""

from __future__ import annotations

import json
from functools import cache

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from rlhf.errors import DataError
from rlhf_runtime.config.data_section import DataSection, SourceSection
from rlhf_runtime.data.dataset import TrainData
from rlhf_runtime.data.template import Template
from rlhf_testing.tiny import tiny_tokenizer


def tokenizer_of(path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(path))


@pytest.fixture(scope="session")
def chars(tmp_path_factory):
    """One token per character, no chat template."""
    return tokenizer_of(tiny_tokenizer(tmp_path_factory.mktemp("chars")))


@pytest.fixture(scope="session")
def chat(tmp_path_factory):
    """One token per character, with the default chat template."""
    return tokenizer_of(tiny_tokenizer(tmp_path_factory.mktemp("chat"), chat_template="default"))


@pytest.fixture(scope="session")
def tokenizer_with(tmp_path_factory):
    """``tokenizer_with(template)``: one token per character, and this chat template."""
    path = tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))

    def use(template):
        tokenizer = tokenizer_of(path)
        tokenizer.chat_template = template
        return tokenizer

    return use


@pytest.fixture(scope="session")
def template_with(tokenizer_with):
    """``template_with(text, **section)``: rows, among them conversations in ``messages``, with this chat template."""

    def template(text, day=None, **section):
        return Template(tokenizer_with(text), DataSection(**{"messages": "messages", **section}), day=day)

    return template


@pytest.fixture(scope="session")
def bpe(tmp_path_factory):
    """Byte pairs trained on text in which `: 4`, `n\\n` and the like are frequent, without any pre-tokenizer, so that
    merges cross the boundary of prompt and answer."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, trainers
    from transformers import PreTrainedTokenizerFast

    text = ["Q: 2+2\nA: 4\nassistant\nThe answer is 42. user\nsystem\n <think>\n\n</think>\n\n x y z"] * 20
    alphabet = [chr(i) for i in range(32, 127)] + ["\n"]
    backend = Tokenizer(models.BPE())
    backend.decoder = decoders.Fuse()
    special = ["<eos>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    backend.train_from_iterator(text, trainer)
    backend.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in special])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")


@pytest.fixture
def with_template(bpe):
    def use(template):
        bpe.chat_template = template
        return bpe

    yield use
    bpe.chat_template = None


@pytest.fixture
def load(tmp_path):
    """``load(tokenizer, form, rows, **section)``: rows of a file, in its order, as the data of a run."""

    def data(tokenizer, form, rows, kind="jsonl", **section):
        path = tmp_path / f"rows.{kind}"
        if kind == "saved":
            datasets.Dataset.from_list(rows).save_to_disk(str(path))
        elif kind == "parquet":
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        else:
            path.write_text(json.dumps(rows) if kind == "json" else "".join(json.dumps(row) + "\n" for row in rows))
        section = DataSection(train=(SourceSection(path=str(path)),), **{"shuffle": False, **section})
        return TrainData(section, tokenizer, form, 0)

    return data


@pytest.fixture
def read(load):
    """``read(tokenizer, form, rows, **section)``: the data of these rows, and its examples."""

    def examples(tokenizer, form, rows, *kind, **section):
        data = load(tokenizer, form, rows, *kind, **section)
        return data, data.examples(data.take(len(rows)))

    return examples


@pytest.fixture
def refusal(load):
    """``refusal(tokenizer, form, good rows, bad row, **section)``: why the bad row is refused. The message names its
    line, and the row can be left out and counted."""

    def refuse(tokenizer, form, good, bad, **section):
        rows = [*good, bad]
        with pytest.raises(DataError) as error:
            load(tokenizer, form, rows, **section).take(len(rows))
        text = str(error.value)
        assert f"rows.jsonl, line {len(rows)}: " in text
        assert text.endswith('Correct the row, or set data.bad_rows = "drop" to drop and count such rows.')
        data = load(tokenizer, form, rows, bad_rows="drop", **section)
        assert [row.index for row in data.take(len(rows))] == [*range(len(good)), 0]
        assert (data.bad_rows, data.dropped) == (1, 0)
        return text

    return refuse


@pytest.fixture(scope="session")
def template_of(tmp_path_factory):
    """Loads a chat template of ``call_templates.py``."""
    from transformers import AutoTokenizer

    path = tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))

    @cache
    def load(calls: str, special: tuple[str, ...]) -> Template:
        tokenizer = AutoTokenizer.from_pretrained(str(path))
        tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
        tokenizer.chat_template = (
            "{% set BR = '\\n' %}{% if tools %}{{ (tools | tojson) + '<eos>' }}{% endif %}{% for m in messages %}"
            "{{ '<|' + m.role + '|>' + m.content }}" + calls + "{{ '<eos>' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
        )
        return Template(tokenizer, DataSection())

    return load
