"""Configs of models, which the start of a run reads several times."""

from __future__ import annotations

import json

from rlhf.interfaces import ModelSpec
from rlhf.types import RoleSpec
from rlhf_modeling.pretrained import read_config
from rlhf_testing.models import model_path


def test_a_config_is_that_of_the_file_of_now_and_belongs_to_its_reader(tmp_path):
    file = tmp_path / "config.json"
    fields = json.loads((model_path() / file.name).read_text())
    spec = ModelSpec(RoleSpec("policy"), str(tmp_path))
    for size in (32, 64):
        file.write_text(json.dumps({**fields, "vocab_size": size}))
        config = read_config(spec)
        assert config.vocab_size == size
        config.vocab_size = 1
        assert read_config(spec).vocab_size == size
