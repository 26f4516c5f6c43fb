import argparse
import contextlib
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import rlhf
from rlhf.errors import ConfigError, PluginNotFound, RlhfError, TrainingError
from rlhf.interfaces import Command
from rlhf.plugins import Plugins
from rlhf_cli.main import command_names, main, split_dotted

HEAVY = ("torch", "transformers", "datasets", "numpy")
SLOW = ("pydantic", "rich", "rlhf_runtime")
"""Imported by commands that check or show something; they would double the time of those that list what is there."""


def imported(*words, stream="stdout", heavy=HEAVY):
    """Exit code, the heavy packages that ``rlhf WORDS`` imports, and what it writes."""
    code = (
        "import atexit, sys\n"
        f"atexit.register(lambda: sys.stderr.write('HEAVY:' + ','.join(m for m in {heavy} if m in sys.modules)))\n"
        f"from rlhf_cli.main import main\nsys.exit(main({list(words)!r}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    errors, _, modules = done.stderr.rpartition("HEAVY:")
    return done.returncode, modules, done.stdout if stream == "stdout" else errors


@pytest.mark.parametrize(
    ("words", "heavy"),
    [
        (("--help",), HEAVY + SLOW),
        (("plugins", "list"), HEAVY + SLOW),
        (("plugins", "-h"), HEAVY + SLOW),
        (("data", "preview", "--help"), HEAVY),
    ],
)
def test_light_commands_import_nothing_heavy(words, heavy):
    code, packages, out = imported(*words, heavy=heavy)
    assert (code, packages) == (0, "")
    assert out


WRONG_OPTION = ("--algo", "sft", "--model", ".", "--data", "rows", "--trainer", "deepspeed", "--generator.use", "vllm")


def test_options_of_trainers_and_generators_are_read_without_what_loads_models():
    words = ("train", *WRONG_OPTION, "--trainer.lrr", "1e-3")
    assert imported(*words, heavy=("transformers", "datasets", "deepspeed", "vllm"))[:2] == (2, "")


MISSING = {
    "generate": ("--model", "./nodel", "--prompt", "x"),
    "eval": ("--model", "./nodel", "--data", "rows.jsonl", "--reward", "file:reward.py"),
    "score": ("--model", "./nodel", "--data", "rows.jsonl", "--reward", "file:reward.py", "-o", "scored.jsonl"),
    "data": ("preview", "--algo", "sft", "--model", "./nodel", "--data", "rows.jsonl"),
    "train": ("--algo", "sft", "--model", "./nodel", "--data", "rows.jsonl"),
}


@pytest.mark.parametrize("command", MISSING)
def test_a_model_that_is_not_here_is_said_before_anything_heavy_is_imported(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    code, heavy, message = imported(command, *MISSING[command], stream="stderr")
    assert (code, heavy) == (1, "")
    assert message == "rlhf: the model folder ./nodel does not exist. In . there are: model. Did you mean 'model'?\n"


def test_a_hub_name_that_cannot_be_looked_up_is_said_before_anything_heavy_is_imported(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, value in {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path / "home")}.items():
        monkeypatch.setenv(name, value)  # the discard port: refused
    (tmp_path / "tiny-model").mkdir()
    code, heavy, message = imported("generate", "--model", "tiny-nodel", "--prompt", "x", stream="stderr")
    assert (code, heavy.split(",")[0]) == (1, "")
    assert (
        "there is no folder tiny-nodel here, so it is taken as a hub name; the model 'tiny-nodel', revision 'main'"
        in message
    )
    assert message.endswith("or use a folder or file. Did you mean 'tiny-model'?\n")


def test_a_file_as_model_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert main(["generate", "--model", "model.safetensors", "--prompt", "x"]) == 1
    assert "model.safetensors is a file, not a model. A model is a folder with config.json" in capsys.readouterr().err


def test_an_empty_prompt_is_named_as_the_flag(capsys):
    assert main(["generate", "--model", "anything", "--prompt", "x", "--prompt", ""]) == 2
    assert capsys.readouterr().err == "rlhf: --prompt is empty; an answer needs at least one token before it\n"


@pytest.mark.parametrize("words", [("plugins", "list"), ("doctor",), ("--help",)])
def test_a_closed_pipe_prints_no_error(words):
    """As in `rlhf plugins list | true`: what little there is stands in a buffer until the end."""
    reader, writer = os.pipe()
    os.close(reader)
    code = f"import sys\nfrom rlhf_cli.main import main\nsys.exit(main({list(words)!r}))"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with os.fdopen(writer, "w") as gone:
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, stdout=gone, stderr=subprocess.PIPE, text=True, check=False, env=environment)
    assert (done.returncode, done.stderr) == (1, "")


def test_help_names_every_command(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    out = capsys.readouterr().out
    names = command_names(Plugins.discover())
    assert {"train", "plugins", "data", "plan", "doctor", "score", "eval", "generate"} <= {*names}
    assert all(re.search(rf"^  {name} +[A-Z]", out, re.MULTILINE) for name in names)


def test_no_command_is_a_usage_error(capsys):
    assert main([]) == 2
    assert "usage: rlhf" in capsys.readouterr().err


def test_servers_of_this_machine_need_no_proxy(monkeypatch, tmp_path):
    monkeypatch.setenv("http_proxy", "http://proxy:1")
    for start in (lambda: main(["plugins", "list", "env"]), lambda: rlhf.train(algorithm="none", output=tmp_path)):
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.setenv(name, "")  # so that it is restored after the test
            monkeypatch.delenv(name)
        with contextlib.suppress(RlhfError):
            start()
        assert "127.0.0.1" in os.environ["no_proxy"]


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"rlhf {rlhf.__version__}\n"


@pytest.mark.parametrize(
    ("flag", "says"),
    [
        ("--sampling", "--sampling: [sampling] is a section. Set a field of it: --sampling.FIELD VALUE."),
        ("--threads", "no flag --threads. Did you mean --run.threads?"),
        ("--every", "no flag --every. Did you mean --eval.every or --checkpoint.every?"),
        ("--sed", "no flag --sed. Did you mean --seed?"),
        ("--dry_runn", "no flag --dry_runn. Did you mean --dry-run?"),
        ("--lr", "no flag --lr. Did you mean --trainer.lr?"),
        ("--batch-size", "no flag --batch-size. Did you mean --data.batch_size?"),
        ("--max_completion_length", "no flag --max_completion_length. Did you mean --sampling.max_new_tokens?"),
        ("--actor_learning_rate", "no flag --actor_learning_rate. Did you mean --trainer.lr?"),
        ("--nonsense", "no flag --nonsense. Fields of the run file are dotted: --run.seed 3"),
    ],
)
def test_an_unknown_flag_gets_a_suggestion(capsys, flag, says):
    assert main(["train", "--algo", "sft", flag, "wandb"]) == 2
    assert f"{says}\n" in capsys.readouterr().err


def test_names_without_a_dot_are_reported_together(capsys):
    assert main(["train", "--lr", "1e-5", "run.toml.missing", "--algo", "sft"]) == 2
    assert "the run file run.toml.missing does not exist" in capsys.readouterr().err, "a flag takes one value"
    assert main(["train", "--lr", "1e-5", "--batch_size", "4", "--trainer.eps", "x", "--algo", "sft"]) == 2
    message = capsys.readouterr().err
    assert "(3 problems)" in message
    for name in ("--trainer.lr", "--data.batch_size", "trainer.eps (flag --trainer.eps): should be a valid number"):
        assert name in message


def test_a_section_that_selects_plugins_is_a_flag():
    from rlhf_runtime.config.command_line import dotted
    from rlhf_runtime.config.load import load

    run = load(None, dotted(["--algorithm", "sft", "--observer", "wandb", "--env", "game"]))
    assert ([o.use for o in run.observer], run.env.use, run.algorithm.use) == (["wandb"], "game", "sft")


def test_files_that_a_shell_lists_behind_one_flag_are_refused(capsys):
    assert main(["train", "--algo", "sft", "--data", "a.jsonl", "b.jsonl", "c.jsonl"]) == 2
    assert "unexpected argument 'c.jsonl'; " in (message := capsys.readouterr().err)
    assert "--data a.jsonl --data b.jsonl" in message


@pytest.mark.parametrize("words", [["--steps", "3", "--run.steps", "5"], ["--run.steps=5", "--steps", "3"]])
def test_an_option_with_two_flags_is_set_by_one_of_them(words, capsys):
    assert main(["train", *words]) == 2
    assert "rlhf: --steps and --run.steps set the same option: remove one of them" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("word", "advice"),
    [("compare", "Did you mean 'show'?"), ("serve", "Did you mean 'serve-reward'?"), ("trian", "Did you mean 'train'?"),
     ("plugin", "Did you mean 'plugins'?"),
     ("sft", "'sft' is an algorithm: rlhf train --algo sft."),
     ("dr-grpo", "'dr-grpo' is an algorithm: rlhf train --algo dr_grpo.")],
)  # fmt: skip
def test_a_command_that_is_meant(word, advice, capsys):
    assert main([word, "run.toml"]) == 2
    names = ", ".join(command_names(Plugins.discover()))
    assert capsys.readouterr().err == f"rlhf: unknown command {word!r}; allowed commands: {names}. {advice}\n"


@pytest.mark.parametrize("flag", ["output_dir", "eval_dataset"])
def test_a_flag_of_another_framework_hides_no_other_problem(flag, capsys):
    words = ["--algo", "grpo", "--model", "x", "--data", "y.jsonl", f"--{flag}", "o", "--unknown", "1"]
    assert main(["train", *words]) == 2
    message = capsys.readouterr().err
    assert f"no flag --{flag}. Did you mean" in message
    assert "no flag --unknown" in message


@pytest.mark.parametrize(
    ("algorithm", "flag", "advice"),
    [("dpo", "ipo", "Did you mean --algorithm.loss.loss_type ipo?"),
     ("grpo", "scale_rewards", "Did you mean --algorithm.advantage.std?"),
     ("rloo", "scale_rewards", "do not have")],
)  # fmt: skip
def test_switches_of_another_framework(algorithm, flag, advice, capsys):
    assert main(["train", "--algo", algorithm, "--model", "x", "--data", "y.jsonl", f"--{flag}"]) == 2
    assert re.search(rf"no flag --{flag}\. .*{re.escape(advice)}", capsys.readouterr().err)


@pytest.fixture
def install(site):
    """install(name, source): a distribution with the command ``name``, beside what is installed."""

    def add(name, source, distribution=""):
        distribution = distribution or f"rlhf-plugin-{name}"
        package = f"throwaway_{distribution.replace('-', '_')}"
        site.distribution(distribution, entry_points=f"[rlhf.command]\n{name} = {package}.{name}\n")
        (site.path / package).mkdir()
        (site.path / package / "__init__.py").write_text("raise ImportError('the package is broken')" * ("!" in source))
        (site.path / package / f"{name}.py").write_text(source)

    return add


HELLO = '''"""Say hello.

More about it.
"""

from rlhf import hookimpl
from rlhf.interfaces import Command


class Hello(Command):
    """Say hello."""

    name = "hello"

    def run(self, args):
        print("hello")
        return 3


@hookimpl
def rlhf_register_command():
    return [Hello]
'''


def test_a_command_of_another_distribution_is_found_and_listed(install, capsys):
    install("hello", HELLO)
    assert main(["hello"]) == 3
    assert main(["rlhf-plugin-hello/hello"]) == 3
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    out = capsys.readouterr().out
    assert out.startswith("hello\nhello\n")
    assert re.search(r"^  hello +Say hello$", out, re.MULTILINE)


def test_a_broken_command_says_so_when_it_is_called_and_breaks_no_other(install, capsys):
    install("hello", HELLO)
    install("broken", '"""Break!"""\n')
    install("odd", "this is not python (")
    install("silent", "x = 1\n")
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    out = capsys.readouterr().out
    assert re.search(r"^  broken +Break!$", out, re.MULTILINE), "its file is read, not imported"
    assert re.search(r"^  odd +\(rlhf-plugin-odd 0\.1\.0: its module cannot be read: ", out, re.MULTILINE)
    assert re.search(r"^  silent +\(rlhf-plugin-silent 0\.1\.0\)$", out, re.MULTILINE)
    assert main(["hello"]) == 3
    capsys.readouterr()
    assert main(["broken"]) == 1
    message = capsys.readouterr().err
    assert message.startswith(
        "rlhf: command 'broken' (rlhf-plugin-broken 0.1.0) failed to import 'throwaway_rlhf_plugin_broken.broken': "
        "ImportError: the package is broken ("
    )
    assert main(["plugins", "list", "command", "--check"]) == 1
    out = capsys.readouterr().out
    assert re.search(r"^command +broken .* failed to import .*: ImportError: the package is broken", out, re.MULTILINE)
    assert re.search(r"^command +hello .* ok$", out, re.MULTILINE)


def test_two_commands_of_one_name_are_told_apart(install, capsys):
    install("hello", HELLO)
    install("hello", HELLO, "other-hello")
    assert main(["hello"]) == 2
    assert capsys.readouterr().err == (
        "rlhf: command 'hello' is provided by other-hello and rlhf-plugin-hello; pick one: 'other-hello/hello' or "
        "'rlhf-plugin-hello/hello'\n"
    )
    assert main(["other-hello/hello"]) == 3


def test_a_command_of_another_distribution_may_stand_in_for_one_of_this(install, capsys):
    install("plan", HELLO.replace('name = "hello"', 'name = "plan"'), "other-plan")
    assert main(["plan"]) == 2
    assert "is provided by other-plan and rlhf-cli" in capsys.readouterr().err
    assert main(["other-plan/plan"]) == 3
    assert main(["rlhf-cli/plan", "--device-memory", "lots"]) == 2
    assert "--device-memory" in capsys.readouterr().err


@pytest.fixture
def command(monkeypatch):
    """command(run, **attributes): ``rlhf probe`` calls ``run(args)``."""

    def install(run, **attributes):
        class Probe(Command):
            """Probe the dispatcher.

            More.
            """

            name = "probe"

            def add_arguments(self, parser):
                parser.add_argument("--known", type=int)

            def run(self, args):
                return run(args)

        for name, value in attributes.items():
            setattr(Probe, name, value)
        discover = Plugins.discover

        def with_probe():
            plugins = discover()
            plugins.register("command", Probe)
            return plugins

        monkeypatch.setattr("rlhf_cli.main.Plugins", SimpleNamespace(discover=with_probe))

    return install


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ConfigError("bad value"), 2, "bad value"),
        (PluginNotFound("no such"), 2, "no such"),
        (TrainingError("nan"), 1, "nan"),
        (TrainingError("row 1: \x1b[31m\nand"), 1, "row 1: \\x1b[31m\nand"),  # no text of a row controls the terminal
        (
            PermissionError(13, "Permission denied", "/etc/run.toml"),
            1,
            "PermissionError: [Errno 13] Permission denied: '/etc/run.toml'. --traceback shows where it was raised",
        ),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_an_error_is_one_message_and_an_exit_code(command, capsys, error, code, message):
    def run(args):
        raise error

    command(run)
    assert main(["probe"]) == code
    assert capsys.readouterr().err == f"rlhf: {message}\n"
    for words in (["probe", "--traceback"], ["--traceback", "probe"]):
        with pytest.raises(type(error)):
            main(words)


def test_a_command_without_an_exit_code_is_an_error(command, capsys):
    command(lambda args: None)
    assert main(["probe"]) == 1
    assert "'rlhf probe' must return its exit code, an integer, got NoneType None" in capsys.readouterr().err


@pytest.mark.parametrize("code", [0, 3, None])
def test_a_command_cannot_end_the_program_without_a_word(command, capsys, code):
    def run(args):
        raise SystemExit(code)

    command(run)
    assert main(["probe"]) == 1
    line = run.__code__.co_firstlineno + 1
    assert re.search(rf"rlhf probe was ended by SystemExit.*{__file__}:{line}", capsys.readouterr().err)


def test_other_errors_are_bugs_and_keep_their_traceback(command):
    command(lambda args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["probe"])


def test_unknown_arguments_are_refused_unless_the_command_takes_overrides(command, capsys):
    namespaces: list[argparse.Namespace] = []
    command(lambda args: namespaces.append(args) or 0)
    with pytest.raises(SystemExit, match="2"):
        main(["probe", "--algorithm.loss.clip", "0.2"])
    assert "unrecognized arguments: --algorithm.loss.clip 0.2" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["probe", "--kno", "3"])  # no abbreviations: they would change meaning as flags are added
    command(lambda args: namespaces.append(args) or 0, run_file_flags=True)
    assert main(["probe", "--known", "3", "--algorithm.loss.clip", "0.2"]) == 0
    assert (namespaces[0].known, namespaces[0].overrides) == (3, ["--algorithm.loss.clip", "0.2"])


def test_help_of_a_command_is_its_docstring(command, capsys):
    command(lambda args: 0)
    with pytest.raises(SystemExit, match="0"):
        main(["probe", "--help"])
    out = capsys.readouterr().out
    assert "\n\nProbe the dispatcher.\n\nMore.\n\n" in out


@pytest.mark.parametrize(
    ("words", "rest", "dotted"),
    [
        (["--a.b", "-o", "file"], ["-o", "file"], ["--a.b"]),
        (["--a.b", "-END"], [], ["--a.b", "-END"]),
        (["--a.b", "-1", "--c.d"], [], ["--a.b", "-1", "--c.d"]),
    ],
    ids=["a flag of the command", "a value with a dash", "a negative number"],
)
def test_the_word_after_a_flag_of_the_run_file_is_its_value_unless_it_is_a_flag(words, rest, dotted):
    assert split_dotted(words, ["-o", "--output"]) == (rest, dotted)


@pytest.mark.linux("/dev/full stands for a full disk")
def test_output_to_a_full_disk_is_one_message():
    code = "import sys\nfrom rlhf_cli.main import main\nsys.exit(main(['plugins', 'list']))"
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "No space left on device" in done.stderr
