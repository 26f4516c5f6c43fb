"""What an error of a plugin says after it passed the boundary."""

import re
from concurrent.futures import ThreadPoolExecutor

import pytest
from rlhf.errors import ConfigError, EnvError, boundary, did_you_mean


def broken() -> None:
    raise ValueError("bad value")


def test_the_message_names_the_line_that_raised() -> None:
    line = broken.__code__.co_firstlineno + 1
    place = re.escape(f"step() of env 'x' raised ValueError: bad value ({__file__}:{line})")
    with pytest.raises(EnvError, match=rf"^{place}$"), boundary(EnvError, "step() of env 'x'"):
        broken()


def test_of_an_error_in_the_core_the_line_that_called_it_is_named() -> None:
    def wrong() -> None:
        did_you_mean("x", None)  # type: ignore[arg-type]

    place = re.escape(f"({__file__}:{wrong.__code__.co_firstlineno + 1})")
    with pytest.raises(EnvError, match=rf"{place}$"), boundary(EnvError, "step()"):
        wrong()


def test_an_error_of_this_project_passes_unchanged() -> None:
    with pytest.raises(ConfigError, match=r"^wrong$"), boundary(EnvError, "step()"):
        raise ConfigError("wrong")


def test_an_exit_is_the_plugins_error() -> None:
    with pytest.raises(EnvError, match=r"step\(\) raised SystemExit: 0"), boundary(EnvError, "step()"):
        raise SystemExit(0)


def test_ctrl_c_passes_in_the_main_thread_only() -> None:
    def interrupted() -> None:
        with boundary(EnvError, "step()"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    with ThreadPoolExecutor(1) as thread, pytest.raises(EnvError, match="KeyboardInterrupt"):
        thread.submit(interrupted).result()
