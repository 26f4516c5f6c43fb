import pytest
from rlhf.errors import ConfigError
from rlhf.plugins import Reference, parse_reference


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        ("reward", "math", {"scheme": "plugin", "name": "math"}),
        ("loss", "plugin:dr_1", {"scheme": "plugin", "name": "dr_1"}),
        ("env", "rlhf-plugin-x/game", {"scheme": "plugin", "name": "game", "distribution": "rlhf-plugin-x"}),
        ("env", "plugin:rlhf-plugin-x/game", {"scheme": "plugin", "name": "game", "distribution": "rlhf-plugin-x"}),
        ("reward", "in process/mine", {"scheme": "plugin", "name": "mine", "distribution": "in process"}),
        ("reward", "file:reward.py", {"scheme": "file", "path": "reward.py"}),
        ("env", "file:a/b c.py:Game", {"scheme": "file", "path": "a/b c.py", "attribute": "Game"}),
        ("reward", "file:C:\\x.py:f", {"scheme": "file", "path": "C:\\x.py", "attribute": "f"}),
        ("env", "python:a.b_c:Game", {"scheme": "python", "path": "a.b_c", "attribute": "Game"}),
        ("reward", "model:org/m", {"scheme": "plugin", "name": "model", "options": {"model": "org/m"}}),
        (
            "reward",
            "https://h:80/p",
            {"scheme": "plugin", "name": "http", "options": {"urls": ["https://h:80/p"]}},
        ),
    ],
)
def test_every_form_of_reference_is_parsed(kind, text, expected):
    assert parse_reference(kind, text) == Reference(kind, text, **expected)


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("rewards", "math", r"no kind of plugin is called 'rewards'; kinds are algorithm, .*Did you mean 'reward'\?"),
        (
            "reward",
            "Dr-X",
            r"reward 'Dr-X' is not a plugin's name.*Did you mean 'dr_x'\?.*'file:PATH.py\[:ATTRIBUTE\]'",
        ),
        ("reward", "", "reward '' is not a plugin's name"),
        ("reward", "a/b/c", "reward 'a/b/c' is not a plugin's name"),
        ("reward", "/c", "reward '/c' is not a plugin's name"),
        ("reward", "score.py", r"reward 'score.py' looks like a file: write 'file:score.py'"),
        ("reward", "file:score", r"expected PATH.py or PATH.py:ATTRIBUTE after 'file:', got 'score'"),
        ("reward", "file:s.py:1x", r"expected PATH.py or PATH.py:ATTRIBUTE after 'file:', got 's.py:1x'"),
        ("reward", "python:a.b", r"expected MODULE:ATTRIBUTE after 'python:', got 'a.b'"),
        ("reward", "python:a-b:c", r"expected MODULE:ATTRIBUTE after 'python:', got 'a-b:c'"),
        ("reward", "trl.rewards:f", "looks like a name in a module: write 'python:trl.rewards:f'"),
        ("loss", "model:x", "loss 'model:x': 'model:' selects only kind reward; write 'NAME'"),
        ("loss", "http://x", "loss 'http://x': 'http:' selects only kind reward; write 'NAME'"),
        ("reward", "model:", "reward 'model:': nothing after 'model:'"),
        ("reward", "http://", "reward 'http://': nothing after 'http:'"),
        (
            "reward",
            "modle:x",
            r"unknown scheme 'modle'; allowed are plugin:, file:, python:, model:, .*Did you mean 'model'\?",
        ),
        ("loss", "pugin:x", r"unknown scheme 'pugin'; allowed are plugin:, file:, python:\. Did you mean 'plugin'\?"),
    ],
)
def test_invalid_references_are_refused(kind, text, message):
    with pytest.raises(ConfigError, match=message):
        parse_reference(kind, text)
