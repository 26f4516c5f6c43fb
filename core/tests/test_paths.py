import pytest
from rlhf.paths import check_path


def test_a_name_may_have_255_bytes(tmp_path):
    longest = str(tmp_path / ("é" * 127 + "x"))
    assert check_path(longest) == longest
    with pytest.raises(ValueError, match=r"cannot be used: File name too long\. Give another path\."):
        check_path(longest + "x")
