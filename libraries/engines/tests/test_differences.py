"""Files with differences of weights, and what a generator keeps for them."""

from __future__ import annotations

import os
import tempfile

import pytest
import torch
from rlhf.errors import ConfigError, SyncError
from rlhf.weights.bucket import Bucket, buckets
from rlhf.weights.fingerprint import marks
from rlhf_engines.differences import SentWeights
from rlhf_engines.weight_files import FOLDER, WeightsFolder, read_bucket, write_bucket

OLD = torch.linspace(-1, 1, 200_000)


def change(*places: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    tensor = OLD.to(dtype).clone()
    tensor[list(places)] += 1
    return tensor


def bucket(**tensors: torch.Tensor) -> Bucket:
    return Bucket(tuple(tensors.items()), tuple(marks(list(tensors.values()))))


@pytest.mark.parametrize(
    ("new", "nbytes"),  # of the entries, without the file's header
    [
        (change(), 0),
        (change(0), 3),
        (change(255), 3),
        (change(256), 4),
        (change(7, 199_999), 20),  # gaps of 6 and 199,991: two bytes each, three elements between them
        (change(3, 4, 5, 600), 16),
        (change(*range(0, 999, 9)), 333),
        (change(600, dtype=torch.float32), 6),
        (-OLD.bfloat16(), 400_000),  # all changed: whole
        (OLD.bfloat16()[:7], 14),
        (OLD.bfloat16().reshape(2, -1), 400_000),
        (torch.where(OLD.bfloat16() > 0.999, torch.nan, OLD.bfloat16()), None),
    ],
)
def test_a_file_of_differences_gives_the_same_bits_in_few_bytes(tmp_path, new, nbytes):
    old_weights = {"w": OLD.to(new.dtype).clone(), "other": torch.zeros(3)}
    file = tmp_path / "weights"
    write_bucket(bucket(w=new), file, old_weights)
    if nbytes is not None:
        data = file.read_bytes()
        assert len(data) - 8 - int.from_bytes(data[:8], "little") == nbytes
    copy = {name: tensor.clone() for name, tensor in old_weights.items()}
    arrived = read_bucket(file, copy)
    assert arrived.received() == {"w": marks([new])[0]}
    assert {name: tensor.shape for name, tensor in copy.items()} == {"w": new.shape, "other": (3,)}
    assert marks([old_weights["w"]]) == marks([OLD.to(new.dtype)])


def test_zeros_of_both_signs_differ(tmp_path):
    write_bucket(bucket(w=-torch.zeros(9)), tmp_path / "weights", {"w": torch.zeros(9)})
    [(_, tensor)] = read_bucket(tmp_path / "weights", {"w": torch.zeros(9)}).tensors
    assert tensor.signbit().all()


class Readers:
    """A worker's copy, and the fingerprints that it reports."""

    def __init__(self, folder):
        self.file, self.held, self.received = folder / "weights", {}, {}

    def load(self, sent: SentWeights, version: int, weights: dict[str, torch.Tensor], fault: str = "") -> bool:
        """Send ``weights`` in buckets. Returns whether only differences were asked for."""
        base, trainers = sent.begin(version), {}
        if not base:
            sent.tensors.clear()
            self.held.clear()
        self.received = {}
        for part in buckets(weights.items(), 4000, trainers):
            sent.write(part, self.file)
            self.received |= read_bucket(self.file, self.held).received()
        if fault:
            self.received[fault] = "0"
        assert (sent.proof(self.received) == trainers) is not bool(fault)
        sent.end(f"load {version}")
        return bool(base)


def test_differences_follow_a_proven_load_of_another_version_only(tmp_path):
    sent_weights, reader = SentWeights({"bfloat16"}), Readers(tmp_path)
    weights = {"a": torch.randn(50, 50), "b": torch.randn(2000), "step": torch.arange(3)}

    def load(version: int, fault: str = "") -> bool:
        weights["a"] += 1e-4
        differences = reader.load(sent_weights, version, weights, fault)
        assert all(
            torch.equal(reader.held[n], t.bfloat16() if t.is_floating_point() else t) for n, t in weights.items()
        )
        return differences

    assert not load(0)
    full_bytes = sent_weights.nbytes
    assert load(1)
    assert sent_weights.nbytes < full_bytes / 3
    assert load(2, fault="a")
    assert not load(3), "after a proof that failed"
    assert load(4)
    assert not load(4), "the same version once more"
    sent_weights.begin(5)
    assert not load(6), "after a load without an end"


@pytest.mark.parametrize(
    ("formats", "source", "target"),
    [
        ({"bfloat16"}, torch.float32, torch.bfloat16),
        ({"bfloat16"}, torch.bfloat16, torch.bfloat16),
        ({"float32"}, torch.bfloat16, torch.bfloat16),
        ({"bfloat16", "float32"}, torch.float32, torch.float32),
    ],
)
def test_weights_are_rounded_where_all_servers_round_them(tmp_path, formats, source, target):
    weights = SentWeights(formats)
    weights.write(bucket(w=OLD.to(source)), tmp_path / "weights")
    assert weights.tensors["w"].dtype == target
    assert torch.equal(read_bucket(tmp_path / "weights").tensors[0][1], OLD.to(source).to(target))


def test_folders_that_killed_processes_left_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    living, left, new = WeightsFolder(None), tmp_path / f"{FOLDER}left", tmp_path / f"{FOLDER}new"
    for folder in (living.path, left, new):
        folder.mkdir(exist_ok=True)
        (folder / "0.safetensors").touch()
    for folder in (living.path, left):
        os.utime(folder, (0, 0))
    pipe = tmp_path / f"{FOLDER}pipe"  # of another user, for instance: it is not waited for
    os.mkfifo(pipe)
    weights_folder = WeightsFolder(None)
    assert {*tmp_path.iterdir()} == {living.path, new, weights_folder.path, pipe}
    weights_folder.remove()
    living.remove()
    assert {*tmp_path.iterdir()} == {new, pipe}


def test_a_file_that_cannot_be_written_fails_the_sync(tmp_path):
    with pytest.raises(SyncError, match=r"1 MiB of weights cannot be written to .*missing: .*generator.folder"):
        write_bucket(bucket(a=OLD), tmp_path / "missing" / "0.safetensors")


def test_a_folder_that_takes_no_files_is_named():
    with pytest.raises(ConfigError, match=r"cannot be written to /proc: .*generator\.folder"):
        WeightsFolder("/proc")  # also the superuser can create nothing there
