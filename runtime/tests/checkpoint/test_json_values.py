import math
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rlhf.errors import CheckpointError
from rlhf_runtime.checkpoint.json_values import dumps, loads, read_json, write_json


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_floats_are_read_back_bit_equal(x):
    assert struct.pack("<d", loads(dumps(x))) == struct.pack("<d", x)


KEYS = st.text(max_size=9).filter(lambda key: key != "$float")
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9)


@settings(max_examples=40, deadline=None)
@given(st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4)))
def test_any_state_is_read_back_equal(value):
    assert loads(dumps(value, nonfinite="mark")) == value


def test_nan_is_refused_unless_marked():
    state = {"kl": {"values": [1.0, math.nan]}}
    with pytest.raises(CheckpointError, match=r"state\.kl\.values\[1\] is nan, which JSON cannot hold.*mark"):
        dumps(state)
    text = dumps({**state, "low": -math.inf}, nonfinite="mark")
    assert "NaN" not in text
    result = loads(text)
    assert math.isnan(result["kl"]["values"][1])
    assert result["low"] == -math.inf


def test_values_that_plain_json_would_change_are_refused():
    with pytest.raises(CheckpointError, match=r"state has the key 1; keys must be text.*Store str\(key\)"):
        dumps({1: "a"})
    with pytest.raises(CheckpointError, match=r"state\.a is a set, which JSON cannot hold. Allowed: dict"):
        dumps({"a": {1}})
    with pytest.raises(CheckpointError, match=r"keys must be text other than '\$float'"):
        dumps({"$float": "x"})
    with pytest.raises(CheckpointError, match="the constant NaN is not JSON"):
        loads('{"a": NaN}')


def test_scalars_of_numpy_become_numbers():
    assert loads(dumps({"a": np.float32(0.1), "b": np.int64(3), "c": np.bool_(True)})) == {
        "a": float(np.float32(0.1)),
        "b": 3,
        "c": True,
    }


def test_lone_surrogates_are_read_back():
    """Byte-level tokenizers can produce lone surrogates, which UTF-8 cannot hold."""
    assert loads(dumps(["\ud83d", "é"]).encode().decode()) == ["\ud83d", "é"]


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "best.json"
    write_json(path, {"step": 1})

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_json(path, {"step": 2})
    assert read_json(path) == {"step": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["best.json"]


def test_files(tmp_path):
    path = tmp_path / "state.json"
    write_json(path, {"a": 0.1})
    assert read_json(path) == {"a": 0.1}
    assert [p.name for p in tmp_path.iterdir()] == ["state.json"]
    path.write_text("{")
    with pytest.raises(CheckpointError, match=r"state\.json is not valid JSON"):
        read_json(path)
    with pytest.raises(CheckpointError, match=r"cannot read .*missing\.json"):
        read_json(tmp_path / "missing.json")
    with pytest.raises(CheckpointError, match="is a object"):
        write_json(path, object())
