import errno
import fcntl
import json
import os
import resource
import signal
import subprocess
import sys
import tomllib
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from rlhf.control_groups import MachineMemory
from rlhf.errors import ConfigError
from rlhf.ops.packing import SequenceData, UnitData, pack
from rlhf_runtime.checkpoint.atomic_files import delete_old, discard_folder, publish_folder, remove_leftovers
from rlhf_runtime.models.precompute import ValueTable
from rlhf_runtime.output import run_directory as module
from rlhf_runtime.output.folder_lock import FolderLock
from rlhf_runtime.output.metrics import read_metrics
from rlhf_runtime.output.run_directory import RunDirectory
from rlhf_runtime.output.run_folder import check_folder
from rlhf_runtime.python.object_files import ObjectFiles
from safetensors import safe_open

PLUGINS = [{"kind": "reward", "name": "math", "distribution": "rlhf-plugin-math", "version": "0.1.0"}]


LOCKED = """
import sys
from rlhf_runtime.output.run_directory import RunDirectory
held = RunDirectory.create(sys.argv[1])
held.write_config("")
print(flush=True)
sys.stdin.read()
"""


def start(path, resume=False, first_step=0):
    """A run that has finished a step."""
    directory = begin(path, resume, first_step)
    directory.metrics.append(first_step + 1, {})
    return directory


def begin(path, resume=False, first_step=0, overwrite=False):
    directory = RunDirectory.create(path, resume, overwrite)
    directory.write_config('[run]\noutput = "a"\n')
    directory.write_manifest(7, PLUGINS, first_step)
    return directory


def test_a_new_run_records_what_it_is(tmp_path):
    with start(tmp_path / "deep" / "run") as directory:
        path = directory.path
    assert tomllib.loads((path / "config.toml").read_text()) == {"run": {"output": "a"}}
    (begun,) = json.loads((path / "manifest.json").read_text())["starts"]
    assert begun["seed"] == 7
    assert begun["plugins"] == PLUGINS
    environment = begun["environment"]
    assert environment["packages"]["torch"] == torch.__version__.split("+")[0] or environment["packages"]["torch"]
    assert environment["cores"] >= 1
    assert environment["cpu"]
    assert environment["python"].startswith("3.")
    assert set(environment) >= {"gpus", "memory_gib", "system", "code"}


@pytest.mark.parametrize(("limit", "gib"), [(None, 8.0), (3 * 2**30, 3.0)])
def test_memory_and_cores_of_a_run_are_those_of_its_control_group(monkeypatch, limit, gib):
    monkeypatch.setattr(module, "usable_cores", lambda: 3)
    monkeypatch.setattr(module, "machine_memory", lambda: MachineMemory(8 * 2**30, 6 * 2**30, limit))
    assert module.environment()["memory_gib"] == gib
    assert module.environment()["cores"] == 3


def test_a_folder_with_a_run_is_refused_unless_resumed(tmp_path):
    start(tmp_path).close()
    with pytest.raises(
        ConfigError,
        match=r"already holds a run \(config\.toml, manifest\.json, metrics\.jsonl\).*--resume.*--overwrite",
    ):
        RunDirectory.create(tmp_path)
    with start(tmp_path, resume=True, first_step=5):
        pass
    starts = json.loads((tmp_path / "manifest.json").read_text())["starts"]
    assert [s["first_step"] for s in starts] == [0, 5]  # a resume adds to the record


def test_nothing_to_resume(tmp_path):
    with pytest.raises(ConfigError, match=r"no run to resume in .*missing\. Omit --resume"):
        RunDirectory.create(tmp_path / "missing", resume=True)
    assert not (tmp_path / "missing").exists()


@pytest.mark.linux("no user can make files in /proc/self")
def test_output_that_cannot_be_written_to():
    with pytest.raises(ConfigError, match=r"run.output /proc/self cannot be written to: .*Choose another --output"):
        RunDirectory.create("/proc/self")


def test_output_that_cannot_be_a_folder(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="which is a file; it must be a folder"):
        RunDirectory.create(tmp_path / "file")
    with pytest.raises(ConfigError, match=r"cannot be created: Not a directory"):
        RunDirectory.create(tmp_path / "file" / "run")


def answered(call, *arguments) -> str:
    """The error of a call, or nothing."""
    try:
        result = call(*arguments)
    except ConfigError as error:
        return str(error)
    if result is not None:
        result.close()
    return ""


@pytest.mark.parametrize("resume", [False, True])
def test_a_check_says_what_a_start_says_and_changes_nothing(tmp_path, resume):
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    start(tmp_path / "holds a run").close()
    holder = start(tmp_path / "taken")
    other = subprocess.Popen(
        [sys.executable, "-c", LOCKED, str(tmp_path / "locked")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert other.stdout is not None
    other.stdout.readline()
    places = [tmp_path / name for name in ("file", "file/below", "empty", "new/deep", "holds a run", "taken", "locked")]
    old_paths = sorted(tmp_path.rglob("*"))
    try:
        checked = [answered(check_folder, place, resume) for place in [*places, "/proc/self", "/proc/self/run"]]
        assert sorted(tmp_path.rglob("*")) == old_paths
        started = [answered(RunDirectory.create, place, resume) for place in [*places, "/proc/self", "/proc/self/run"]]
    finally:
        other.kill()
        other.communicate()
        holder.close()
    assert checked == started
    assert [not text for text in checked].count(True) == (1 if resume else 2)
    assert check_folder(tmp_path / "holds a run", resume=True) is None


def test_foreign_files_in_the_folder_are_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    start(tmp_path).close()
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_two_runs_in_one_process_are_refused(tmp_path):
    with start(tmp_path):
        assert FolderLock.is_held(tmp_path)  # which does not release it
        with pytest.raises(ConfigError, match="another run of this process is using"):
            RunDirectory.create(tmp_path, resume=True)
        (tmp_path / "link").symlink_to(tmp_path)
        with pytest.raises(ConfigError, match="another run of this process"):
            RunDirectory.create(tmp_path / "link", resume=True)
    RunDirectory.create(tmp_path, resume=True).close()


def test_two_processes_are_refused_and_a_killed_one_is_no_obstacle(tmp_path):
    """The killed process leaves a forked child behind, as a driver with workers does."""
    program = (
        "import os, sys, time; from rlhf_runtime.output.run_directory import RunDirectory\n"
        "d = RunDirectory.create(sys.argv[1]); d.write_config('')\n"
        "child = os.fork()\n"
        "if child == 0: time.sleep(30)\n"
        "print(child, flush=True); time.sleep(30)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    child = int(process.stdout.readline())
    try:
        with pytest.raises(ConfigError, match=rf"another run is using .* \(process {process.pid} on "):
            RunDirectory.create(tmp_path, resume=True)
        process.send_signal(signal.SIGKILL)
        process.wait()
        os.kill(child, 0)  # the child is alive
        RunDirectory.create(tmp_path, resume=True).close()
    finally:
        os.kill(child, signal.SIGKILL)
        process.kill()
        process.wait()
        process.stdout.close()


def test_cut_goes_back_to_the_checkpoint(tmp_path):
    batch = pack([UnitData([SequenceData([1, 2], {"loss_mask": [False, True]})], {"reward": 0.5})])
    with begin(tmp_path) as directory:
        (tmp_path / "rollouts").mkdir()
        for step in (1, 2, 3):
            directory.metrics.append(step, {"loss": step / 10})
            directory.rollouts(step).write_text("{}\n")
            directory.export(step, lambda f: (f / "model").write_text("x"))
            directory.keep_batch(step, "gradient is nan", batch)
    (tmp_path / "rollouts" / ".saving-step-000004.arrow").write_text("half")
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')
    with RunDirectory.create(tmp_path, resume=True) as directory:
        directory.cut(2)
        assert [line["step"] for line in read_metrics(directory.metrics.path)] == [1, 2]
        assert sorted(p.name for p in (tmp_path / "rollouts").iterdir()) == ["step-000001.arrow", "step-000002.arrow"]
        assert sorted(p.name for p in (tmp_path / "exports").iterdir()) == ["step-000001", "step-000002"]
        names = ["step-000001-0001.safetensors", "step-000002-0001.safetensors"]
        assert sorted(p.name for p in (tmp_path / "skipped").iterdir()) == names
        directory.metrics.append(3, {"loss": 1.0})
        directory.cut(None)  # no checkpoint: everything that steps recorded goes
        assert read_metrics(directory.metrics.path) == []
        assert not list((tmp_path / "rollouts").iterdir())
        assert not list((tmp_path / "skipped").iterdir())
        assert (tmp_path / "config.toml").exists()


@pytest.mark.linux("elsewhere a file that is too large kills no process")
@pytest.mark.parametrize("kind", ["skipped batch", "precomputed values", "rows given in Python"])
def test_a_resume_deletes_what_a_process_that_died_while_writing_left(tmp_path, kind):
    """safetensors writes to a file with a name of its own, beside the one that it is given."""
    begin(tmp_path).close()
    values = ValueTable({bytes([n]) * 16: torch.zeros(1000) for n in range(10)})
    batch = pack([UnitData([SequenceData([1] * 5000, {"loss_mask": [True] * 5000})])])
    writers = {
        "skipped batch": lambda: RunDirectory.create(tmp_path, resume=True).keep_batch(1, "gradient is nan", batch),
        "precomputed values": lambda: values.save(tmp_path / "precomputed" / "reference.safetensors", "model"),
        "rows given in Python": lambda: ObjectFiles(tmp_path).rows("train", [{"prompt": "x" * 20_000}]),
    }
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
        with suppress(BaseException):
            writers[kind]()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGXFSZ
    folder = tmp_path / {"s": "skipped", "p": "precomputed", "r": "objects"}[kind[0]]
    assert list(folder.iterdir())
    RunDirectory.create(tmp_path, resume=True).close()
    assert list(folder.iterdir()) == []


def test_a_reader_keeps_no_model_or_export_from_being_replaced(tmp_path, monkeypatch):
    """As on NFS, where the folder of an open file cannot be deleted."""

    def refuse(*arguments, **options):
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    with start(tmp_path) as directory:
        directory.export(2, lambda folder: (folder / "config.json").touch())
        directory.publish_model(lambda folder: (folder / "1").touch())
        with monkeypatch.context() as patch:
            patch.setattr(os, "rmdir", refuse)
            for number in "23":
                directory.publish_model(lambda folder, number=number: (folder / number).touch())
                assert [path.name for path in directory.model.iterdir()] == [number]
            directory.cut(1)
            assert not directory.exports(2).exists()
            directory.close()
            begin(tmp_path, overwrite=True).close()
            assert not directory.model.exists()
    RunDirectory.create(tmp_path, resume=True).close()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith((".saving", ".discarded"))]


def test_a_folder_is_deleted_again_while_a_reader_has_a_file_of_the_old_one_open(tmp_path, monkeypatch):
    """On NFS such a file stays in its folder until it is closed."""

    def refuse(*arguments, **options):
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    path, notes = tmp_path / "model", []
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refuse)
        for _ in range(3):
            publish_folder(path, lambda folder: (folder / "1").touch())
            discard_folder(path)
            assert not path.exists()
        publish_folder(path, lambda folder: (folder / "1").touch())
        delete_old(path, notes.append)
    assert Path(notes[0].partition(" is no longer needed")[0]).is_dir(), "the user can delete it by this name"
    remove_leftovers(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_comes_back_where_it_cannot_be_replaced(tmp_path, monkeypatch):
    path, rename = tmp_path / "model", os.rename
    publish_folder(path, lambda folder: (folder / "old").touch())

    def refuse_new(source, target):
        if Path(source).name == ".saving-model":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        rename(source, target)

    monkeypatch.setattr(os, "rename", refuse_new)
    with pytest.raises(OSError, match="Input/output error"):
        publish_folder(path, lambda folder: (folder / "new").touch())
    assert [file.name for file in path.iterdir()] == ["old"]
    assert [folder.name for folder in tmp_path.iterdir()] == ["model"]


def test_exports_are_whole_rotated_and_replaced(tmp_path):
    def fail(folder):
        (folder / "half").write_text("x")
        raise OSError("disk")

    with start(tmp_path) as directory:
        for step in (5, 10, 15):
            directory.export(step, lambda f: (f / "config.json").write_text("{}"), keep=2)
        assert sorted(p.name for p in (tmp_path / "exports").iterdir()) == ["step-000010", "step-000015"]
        (tmp_path / "exports" / ".discarded-step-000010").touch()  # it cannot be deleted
        with pytest.warns(match="step-000010 is no longer needed and could not be deleted"):
            assert directory.export(20, lambda f: (f / "config.json").write_text("{}"), keep=2).exists()
        with pytest.raises(OSError, match="disk"):
            directory.publish_model(fail)
        assert not directory.model.exists()
        directory.publish_model(lambda f: (f / "a").write_text("1"))
        directory.publish_model(lambda f: (f / "b").write_text("2"))
        assert [p.name for p in directory.model.iterdir()] == ["b"]
        assert not [p.name for p in tmp_path.iterdir() if p.name.startswith((".saving", ".discarded"))]


@pytest.mark.parametrize("dies", [True, False], ids=["while an old export is deleted", "before that"])
def test_a_process_that_dies_while_exports_are_rotated_leaves_no_half_and_no_old_export(tmp_path, monkeypatch, dies):
    def write(folder):
        (folder / "config.json").write_text("{}")

    def die(path, *_, **__):
        if path.exists():
            raise KeyboardInterrupt

    with start(tmp_path) as directory:
        directory.export(5, write, keep=1)
        if dies:
            with monkeypatch.context() as dying:
                dying.setattr("shutil.rmtree", die)
                with pytest.raises(KeyboardInterrupt):
                    directory.export(10, write, keep=1)
            assert not directory.exports(5).exists(), "a folder that is deleted in part has the name of an export"
        else:
            directory.export(10, write, keep=None)
        old_time = (directory.exports(10) / "config.json").stat().st_mtime_ns
    with RunDirectory.create(tmp_path, resume=True) as directory:
        directory.export(10, write, keep=1)
        assert [path.name for path in (tmp_path / "exports").iterdir()] == ["step-000010"]
        assert (directory.exports(10) / "config.json").stat().st_mtime_ns == old_time


def test_skipped_batches_are_kept_and_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SKIPPED_KEPT", 2)
    batch = pack([UnitData([SequenceData([1, 2], {"loss_mask": [False, True]})], {"reward": 0.5})])
    with start(tmp_path) as directory:
        paths = [directory.keep_batch(step, "gradient is nan", batch) for step in (1, 2, 2, 2, 2)]
    assert [p.exists() for p in paths] == [False, False, False, True, True]
    assert [p.name for p in paths[3:]] == ["step-000002-0003.safetensors", "step-000002-0004.safetensors"]
    with safe_open(paths[-1], "pt") as file:
        assert file.metadata() == {"reason": "gradient is nan"}
        assert torch.equal(file.get_tensor("ids_N"), batch.ids_N)
        assert torch.equal(file.get_tensor("tok.loss_mask"), batch.tok["loss_mask"])
        assert torch.equal(file.get_tensor("unit.reward"), batch.unit["reward"])


def test_observing_imports_no_torch():
    files = (
        "observe.progress",
        "observe.sample_metrics",
        "observe.timeline",
        "output.run_directory",
        "loop.best_value",
    )
    files = (*files, "loop.signals", "checkpoint", "checkpoint.saved_groups")
    modules = ", ".join(f"rlhf_runtime.{file}" for file in files)
    program = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.parametrize(
    ("saved", "way"), [(False, "no checkpoint: --resume starts it from step 0"), (True, "Continue it")]
)
def test_a_run_that_failed_before_its_first_checkpoint_says_what_a_resume_does(tmp_path, saved, way):
    start(tmp_path).close()
    if saved:
        (tmp_path / "checkpoints").mkdir()
    with pytest.raises(ConfigError, match=f"already holds a run.*{way}"):
        RunDirectory.create(tmp_path)


FOLDERS = ("rollouts", "exports", "skipped", "precomputed")


def test_a_run_without_a_finished_step_is_replaced(tmp_path):
    with begin(tmp_path) as directory:
        directory.metrics.append(0, {"eval/reward": 1.0})  # an evaluation before the first step
    for name in FOLDERS:
        (tmp_path / name).mkdir()
        (tmp_path / name / "a").touch()
    (tmp_path / "notes.txt").write_text("mine")
    old_paths = sorted(tmp_path.rglob("*"))
    check_folder(tmp_path)
    assert sorted(tmp_path.rglob("*")) == old_paths, "a check deletes nothing"
    RunDirectory.create(tmp_path).close()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "notes.txt", "precomputed"]


@pytest.mark.parametrize("saved", ["checkpoints/step-000001", "exports/step-000001", "model", "model-critic"])
def test_a_saved_run_is_not_replaced_without_overwrite(tmp_path, saved):
    begin(tmp_path).close()
    (tmp_path / saved).mkdir(parents=True)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "stall-policy-0.txt").touch()  # of a launcher with worker processes
    with pytest.raises(ConfigError, match=r"already holds a run.*delete it with --overwrite"):
        RunDirectory.create(tmp_path)
    assert (tmp_path / saved).exists()
    check_folder(tmp_path, overwrite=True)
    RunDirectory.create(tmp_path, overwrite=True).close()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "notes.txt"]


def test_a_damaged_record_is_not_replaced_without_overwrite(tmp_path):
    begin(tmp_path).close()
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match="already holds a run"):
        RunDirectory.create(tmp_path)


@pytest.mark.parametrize("manifest", [None, "{}", "no json", '{"schema": 1}', '{"schema": 2, "starts": []}', "[]"])
def test_a_folder_that_is_not_a_run_is_never_deleted(tmp_path, manifest):
    (tmp_path / "model").mkdir()
    if manifest is not None:
        (tmp_path / "manifest.json").write_text(manifest)
    for overwrite in (False, True):
        with pytest.raises(ConfigError, match=r"already holds .*model, but no manifest\.json of a run"):
            RunDirectory.create(tmp_path, overwrite=overwrite)
    assert (tmp_path / "model").exists()


def test_a_folder_that_another_process_works_in_is_not_overwritten(tmp_path):
    with start(tmp_path), pytest.raises(ConfigError, match="is using"):
        RunDirectory.create(tmp_path, overwrite=True)
    assert (tmp_path / "metrics.jsonl").exists()


def test_a_file_system_without_locks_is_refused_and_its_runs_can_be_looked_at(tmp_path, monkeypatch):
    def refuse(*arguments):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    begin(tmp_path).close()
    monkeypatch.setattr(fcntl, "lockf", refuse)
    monkeypatch.setattr(fcntl, "fcntl", refuse)
    for claim in (RunDirectory.create, check_folder):
        with pytest.raises(ConfigError, match=r"cannot be locked: No locks available\..* mount it with locks"):
            claim(tmp_path)
    assert not FolderLock.is_held(tmp_path)


def test_the_lock_of_another_process_is_seen_without_taking_it(tmp_path):
    assert not FolderLock.is_held(tmp_path)
    process = subprocess.Popen([sys.executable, "-c", LOCKED, str(tmp_path)], stdin=-1, stdout=-1)
    process.stdout.readline()
    content = (tmp_path / ".lock").read_text()
    assert FolderLock.is_held(tmp_path)
    assert (tmp_path / ".lock").read_text() == content
    process.communicate()
    assert not FolderLock.is_held(tmp_path)


def test_a_check_leaves_the_lock_of_an_earlier_run_as_it_is(tmp_path):
    start(tmp_path).close()
    lock = tmp_path / ".lock"
    lock.write_text("process 1 on another-machine\n")
    os.utime(lock, (1e9, 1e9))  # `rlhf runs` shows when a killed run was last at work
    check_folder(tmp_path, overwrite=True)
    assert (lock.read_text(), lock.stat().st_mtime) == ("process 1 on another-machine\n", 1e9)


def test_a_new_run_deletes_what_an_earlier_one_was_given_and_it_does_not_read(tmp_path):
    folder = tmp_path / "objects"
    folder.mkdir()
    (folder / "model-0123456789ab").mkdir()
    names = ("train-0123456789ab.jsonl", "train-ba9876543210.jsonl", "notes.txt")
    for name in names:
        (folder / name).touch()
    config = f"[data]\ntrain = ['{folder}/train-ba9876543210.jsonl']\n"
    with RunDirectory.create(tmp_path) as directory:
        directory.write_config(config)
        directory.write_manifest(7, PLUGINS, 0)
        directory.metrics.append(1, {})
    assert sorted(path.name for path in folder.iterdir()) == ["notes.txt", "train-ba9876543210.jsonl"]
    with RunDirectory.create(tmp_path, resume=True) as directory:
        directory.write_config("")
    assert len(list(folder.iterdir())) == 2, "a resume deletes nothing"


def test_the_manifest_says_how_the_last_start_ended(tmp_path):
    with start(tmp_path) as directory:
        directory.write_end("failed", "DataError: https://user:password@host/rows is empty")
    with start(tmp_path, resume=True, first_step=1):
        first, second = json.loads((tmp_path / "manifest.json").read_text())["starts"]
    assert (first["ended"]["status"], "ended" in second) == ("failed", False)
    assert first["ended"]["why"] == "DataError: https://<hidden>@host/rows is empty"
