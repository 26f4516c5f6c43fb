import errno
import json
import re
import resource
import shutil

import pytest
from rlhf.errors import CheckpointError, RolloutError, TrainingError
from rlhf_runtime.checkpoint.store import SCHEMA, CheckpointStore


def write(text="weights"):
    def fill(folder):
        (folder / "policy").mkdir()
        (folder / "policy" / "model.safetensors").write_text(text)
        (folder / "state.json").write_text("{}")

    return fill


def steps(store):
    return sorted(p.name for p in store.root.iterdir())


def test_saved_checkpoint_comes_back(tmp_path):
    store = CheckpointStore(tmp_path)
    assert store.newest() is None
    path = store.save(3, write("abc"), {"seed": 7, "lr": 0.1}, best={"metric": "eval/loss", "value": 0.1 + 0.2})
    checkpoint = CheckpointStore(tmp_path).open(3)
    assert checkpoint.path == path == tmp_path / "checkpoints" / "step-000003"
    assert checkpoint.meta == {"seed": 7, "lr": 0.1}
    assert (path / "policy" / "model.safetensors").read_text() == "abc"
    assert set(checkpoint.contents) == {"policy/model.safetensors", "state.json"}
    assert CheckpointStore(tmp_path).best().best == {"metric": "eval/loss", "value": 0.1 + 0.2}


def test_a_disk_without_space_for_the_checkpoints(tmp_path, monkeypatch):
    notes = []
    store = CheckpointStore(tmp_path, note=notes.append)
    usage = shutil.disk_usage(tmp_path)._replace(free=10 * 2**30)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    store.check_space(2**28, copies=3)  # 9 GiB
    assert not notes
    store.check_space(2**28, copies=4)
    assert "10.0 GiB of free space, and the run needs about 12.0 GiB: 4 checkpoints" in notes.pop()
    for step in (1, 2):
        store.save(step, write(), {})
    store.check_space(2**28, copies=4)  # two of them are there
    assert not notes
    with pytest.raises(CheckpointError, match=r"at least 12.0 GiB.*Free some space, or choose another run.output"):
        store.check_space(3 * 2**28 * 4, copies=1)
    usage = usage._replace(total=0, free=0)  # not known
    store.check_space(2**40, copies=1)


def test_rotation_keeps_the_newest_and_the_best(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    for step in range(1, 7):
        best = {"metric": "eval/pass@1", "value": step / 10} if step in (1, 3) else None
        store.save(step, write(), {}, best)
    assert steps(store) == ["best.json", "step-000003", "step-000005", "step-000006"]
    store.mark_best(6, metric="eval/pass@1", value=0.9)
    store.save(7, write(), {})
    assert steps(store) == ["best.json", "step-000006", "step-000007"]
    assert store.best().step == 6


def test_old_checkpoints_go_only_after_the_new_one_is_complete(tmp_path):
    store = CheckpointStore(tmp_path, keep=1)
    store.save(1, write(), {})

    def look(folder):
        assert not store.open(1).damage()  # still there while the new one is written
        write()(folder)

    store.save(2, look, {})
    assert steps(store) == ["step-000002"]


def test_an_old_checkpoint_that_cannot_be_deleted_is_noted_and_the_new_one_is_saved(tmp_path):
    notes = []
    store = CheckpointStore(tmp_path, keep=1, note=notes.append)
    store.save(1, write(), {})
    obstacle = store.root / ".discarded-step-000001"
    obstacle.touch()
    store.save(2, write(), {})
    assert [c.step for c in store.complete()] == [1, 2]
    assert "step-000001 is no longer needed and could not be deleted" in notes[0]
    obstacle.unlink()
    store.save(3, write(), {})
    assert [c.step for c in store.complete()] == [3]


def test_a_step_is_saved_once(tmp_path):
    store = CheckpointStore(tmp_path)
    store.save(1, write(), {})
    with pytest.raises(CheckpointError, match=r"step-000001 already holds a complete checkpoint"):
        store.save(1, write(), {})


def test_an_error_while_writing_is_reported_and_leaves_nothing(tmp_path):
    store = CheckpointStore(tmp_path)
    store.save(1, write(), {})

    def fail(folder):
        write()(folder)
        raise ValueError("tensor has no storage")

    with pytest.raises(CheckpointError, match=r"step-000002 could not be saved: ValueError: tensor has no storage\."):
        store.save(2, fail, {})
    assert steps(store) == ["step-000001"]

    def refuse(folder):
        raise RolloutError("as it is")

    with pytest.raises(RolloutError, match="as it is"):  # an error of this project keeps its class
        store.save(2, refuse, {})
    with pytest.raises(CheckpointError, match=r"meta\.x is a object, which JSON cannot hold"):
        store.save(2, write(), {"x": object()})
    assert steps(store) == ["step-000001"]


def test_an_error_of_a_library_that_writes_names_the_file(tmp_path):
    """The libraries of models and tokenizers raise errors of the disk in classes of their own."""
    store = CheckpointStore(tmp_path)
    with (
        pytest.raises(CheckpointError, match=r"model could not be saved: Exception: Input/output error.*start the run"),
        store.writing(tmp_path / "model"),
    ):
        raise Exception("Input/output error (os error 5)")


def test_a_full_disk_of_a_rank_is_reported_like_that_of_the_run(tmp_path):
    store = CheckpointStore(tmp_path)
    store.save(1, write(), {})

    def fail(folder):
        raise TrainingError(
            "policy rank 1 (node a): save() raised SafetensorError: No space left on device (os error 28)"
        )

    for attempt in (lambda: store.save(2, fail, {}), lambda: fill(store, fail)):
        with pytest.raises(CheckpointError, match=r"policy rank 1 .*The disk is full.*steps \[1\] are intact"):
            attempt()


def fill(store, fail):
    with store.writing(store.root / "model"):
        fail(store.root)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda p: (p / "manifest.json").unlink(), "manifest.json is missing"),
        (lambda p: (p / "manifest.json").write_text("{"), "is not valid JSON"),
        (lambda p: (p / "manifest.json").write_text('{"schema": 1}'), "manifest.json is damaged"),
        (lambda p: (p / "policy" / "model.safetensors").unlink(), "policy/model.safetensors is missing"),
        (lambda p: (p / "state.json").write_text("{"), "state.json has 1 bytes, expected 2"),
    ],
)
def test_no_older_checkpoint_stands_in_for_one_that_cannot_be_read(tmp_path, damage, reason):
    store = CheckpointStore(tmp_path)
    store.save(1, write(), {})
    damage(store.save(2, write(), {}))
    with pytest.raises(CheckpointError, match=rf"(?s)step-000002: .*{re.escape(reason)}.*to continue from step 1\."):
        store.newest()
    with pytest.raises(
        CheckpointError, match=r"step 2 .* cannot be used: .*The complete checkpoints are those of steps \[1\]"
    ):
        store.open(2)
    store.save(2, write(), {})  # what is incomplete is replaced
    assert store.newest().step == 2


def test_the_error_for_a_flipped_bit_names_the_file_and_the_remedy(tmp_path):
    store = CheckpointStore(tmp_path)
    for step in (1, 2):
        path = store.save(step, write("weights"), {})
    (path / "policy" / "model.safetensors").write_text("weighta")
    with pytest.raises(
        CheckpointError,
        match=r"step-000002 is damaged: policy/model\.safetensors has SHA-256 .*from step 1\. Nothing was changed",
    ):
        store.open(2)
    assert store.open(1).step == 1
    (store.root / "step-000001" / "state.json").write_text("[]")
    with pytest.raises(CheckpointError, match="start the run from the beginning with --overwrite"):
        store.open(1)


def test_the_error_for_a_file_that_cannot_be_read_names_the_file(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    store = CheckpointStore(tmp_path)
    path = store.save(1, write("x" * folder.stat().st_size), {})
    (path / "policy" / "model.safetensors").unlink()
    folder.rename(path / "policy" / "model.safetensors")  # of the same size, so only reading fails
    with pytest.raises(CheckpointError, match=r"damaged: policy/model\.safetensors cannot be read: Is a directory"):
        store.open(1)


def test_a_changed_manifest_is_damage_too(tmp_path):
    store = CheckpointStore(tmp_path)
    path = store.save(1, write(), {"seed": 1})
    manifest = path / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"seed": 1', '"seed": 2'))
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged"):
        store.open(1)


def test_a_newer_layout_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("rlhf_runtime.checkpoint.store.SCHEMA", SCHEMA + 1)
    CheckpointStore(tmp_path).save(1, write(), {})
    monkeypatch.undo()
    with pytest.raises(
        CheckpointError, match=rf"layout is version {SCHEMA + 1}, but this release reads version {SCHEMA}"
    ):
        CheckpointStore(tmp_path).open(1)
    with pytest.raises(
        CheckpointError, match=rf"layout is version {SCHEMA + 1}.* Continue with the release that saved"
    ):
        CheckpointStore(tmp_path).newest()


def test_a_newer_layout_is_named_whatever_its_own_checksum_is(tmp_path):
    path = CheckpointStore(tmp_path).save(1, write(), {}) / "manifest.json"
    path.write_text(json.dumps({"schema": SCHEMA + 1, "digest": "of another kind"}))
    with pytest.raises(
        CheckpointError, match=rf"layout is version {SCHEMA + 1}, but this release reads version {SCHEMA}"
    ):
        CheckpointStore(tmp_path).newest()


def test_an_unknown_step_names_those_there_are(tmp_path):
    store = CheckpointStore(tmp_path)
    store.save(5, write(), {})
    with pytest.raises(
        CheckpointError, match=r"step 4 .* there is no such folder\. The complete checkpoints are those of steps \[5\]"
    ):
        store.open(4)
    with pytest.raises(CheckpointError, match="step 4"):
        store.mark_best(4)


def test_clean_repairs_the_pointer_to_the_best(tmp_path):
    notes = []
    store = CheckpointStore(tmp_path, keep=3, note=notes.append)
    store.save(1, write(), {}, best={"metric": "m", "value": 1.0})
    store.save(2, write(), {}, best={"metric": "m", "value": 2.0})
    (store.root / "best.json").write_text(json.dumps({"step": 1, "metric": "m", "value": 1.0}))
    store.clean()
    assert store.best().step == 2
    for step in (1, 2):
        (store.root / f"step-00000{step}" / "manifest.json").unlink()
    store.clean()
    assert (store.root / "best.json").exists()  # the checkpoint may be mended
    assert "step-000002, cannot be used and is left as it is: manifest.json is missing" in notes[-1]
    for step in (1, 2):
        shutil.rmtree(store.root / f"step-00000{step}")
    store.clean()
    assert store.best() is None
    assert notes[-1] == "the best checkpoint, step 2, no longer exists"


def test_clean_says_that_the_disk_is_full(tmp_path):
    store = CheckpointStore(tmp_path)
    store.save(1, write(), {}, best={"metric": "m", "value": 1.0})
    (store.root / "best.json").unlink()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))  # bytes of a file
    try:
        with pytest.raises(CheckpointError, match=r"checkpoints could not .*disk is full.*steps \[1\] are intact"):
            store.clean()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_clean_leaves_a_best_step_that_was_marked_later_than_it_was_saved(tmp_path):
    """Its own manifest does not say it: only the pointer does."""
    notes = []
    store = CheckpointStore(tmp_path, keep=3, note=notes.append)
    store.save(1, write(), {}, best={"metric": "m", "value": 1.0})
    store.save(2, write(), {})
    store.mark_best(2, metric="m", value=2.0)
    store.clean()
    assert store.best().step == 2
    assert notes == []


def test_clean_deletes_the_old_checkpoints_that_a_killed_save_did_not(tmp_path):
    store = CheckpointStore(tmp_path, keep=9)
    for step in (1, 2, 3, 4):
        store.save(step, write(), {}, best={"metric": "loss", "value": 1.0} if step == 1 else None)
    CheckpointStore(tmp_path, keep=2).clean()
    assert [c.step for c in store.complete()] == [1, 3, 4]


def test_leftovers_are_removed_and_noted(tmp_path, monkeypatch):
    def busy(*_):
        raise OSError(errno.EBUSY, "a reader has a file of it open")

    notes = []
    store = CheckpointStore(tmp_path, note=notes.append)
    store.save(1, write(), {})
    (store.root / ".saving-step-000002").mkdir()
    (store.root / ".saving-step-000002" / "half").write_text("x")
    with monkeypatch.context() as patched:
        patched.setattr("shutil.rmtree", busy)
        store.clean()
    assert not notes
    store.clean()
    assert steps(store) == ["step-000001"]
    assert "left by a process that was killed" in notes[0]
