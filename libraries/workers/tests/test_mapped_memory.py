"""Memory that two processes map: when it is released, what is sent about it, and systems that forbid it."""

from __future__ import annotations

import base64
import json
import os

import pytest
import torch
from rlhf.errors import SyncError
from rlhf.weights.bucket import buckets
from rlhf_workers.links import shared_memory
from rlhf_workers.links.coordination import serve
from rlhf_workers.links.ends import connect_receiver, connect_sender
from rlhf_workers.links.link import Link
from rlhf_workers.links.shared_memory import SharedBuffer, _open_handle
from torch.multiprocessing import reductions
from torch.multiprocessing.reductions import StorageWeakRef

CPU, GPU = torch.device("cpu"), torch.device("cuda", 3)


@pytest.mark.linux("memfd_create")
def test_a_receiver_is_done_with_a_bucket_after_it_released_its_memory(monkeypatch):
    mapped, released = [], []
    open_handle = _open_handle

    def opened(handle, device):
        memory = open_handle(handle, device)
        mapped.append(StorageWeakRef(memory.untyped_storage()))
        return memory

    _, address = serve("127.0.0.1", 20.0)
    link = Link("shared", address, 1, 1, False, 20.0)
    source, sink = connect_sender(link, 0), connect_receiver(link, 0, CPU)
    monkeypatch.setattr(shared_memory, "_open_handle", opened)
    add = sink.coordination.add
    monkeypatch.setattr(
        sink.coordination, "add", lambda key: (released.append([m.expired() for m in mapped]), add(key))
    )
    tensors = {}
    for header in source.send(buckets([(f"w{n}", torch.full((100,), float(n))) for n in range(3)], 400, {})):
        with sink.open(header) as bucket:
            tensors |= {name: tensor.clone() for name, tensor in bucket.tensors}
    assert bucket.tensors == (), "the caller may keep the bucket"
    assert released == [[True], [True] * 2, [True] * 3]
    assert {name: tensor.unique().tolist() for name, tensor in tensors.items()} == {"w0": [0], "w1": [1], "w2": [2]}
    with (
        pytest.raises(SyncError, match="refused"),
        sink.open(next(source.send(buckets([("w", torch.ones(9))], 99, {})))),
    ):
        raise SyncError("refused")
    assert mapped[-1].expired()
    assert len(released) == 3, "a bucket that was not loaded is not reported as done"


def test_with_a_stand_in_for_torchs_export_a_handle_has_what_another_process_needs(monkeypatch):
    exported = {name: f"<{name}>" for name in shared_memory.REBUILT} | {
        "storage_handle": b"\x00handle", "storage_size_bytes": 512, "storage_offset_bytes": 2**21,
        "ref_counter_handle": b"/file", "ref_counter_offset": 7, "event_handle": b"\xff", "event_sync_required": True,
    }  # fmt: skip
    monkeypatch.setattr(reductions, "reduce_tensor", lambda tensor: (None, tuple(exported.values())))
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    rebuilt = {}
    monkeypatch.setattr(reductions, "rebuild_cuda_tensor", lambda **arguments: rebuilt.update(arguments))
    buffer = SharedBuffer.__new__(SharedBuffer)
    buffer._file, buffer.memory = -1, torch.empty(512, dtype=torch.uint8)
    handle = buffer.handle()
    assert base64.b64encode(b"\x00handle").decode() in handle
    _open_handle(handle, GPU)
    assert rebuilt.keys() == set(shared_memory.REBUILT)
    assert {name: rebuilt[name] for name in shared_memory.HANDLE_FIELDS} == {
        name: exported[name] for name in shared_memory.HANDLE_FIELDS
    }
    assert (rebuilt["storage_device"], rebuilt["tensor_size"], rebuilt["dtype"]) == (3, (512,), torch.uint8)


def test_memory_of_a_process_that_is_gone_is_an_error_in_words():
    with pytest.raises(SyncError, match=r"cannot map .*FileNotFoundError.* sync\.transport = 'store'"):
        _open_handle(json.dumps([2**22 + 1, 3, 100]), CPU)


def test_with_a_stand_in_for_ptrace_rules_that_forbid_it_the_error_names_them(monkeypatch):
    def forbidden(*arguments):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", forbidden)
    with pytest.raises(SyncError, match=r"PermissionError.*same user.*ptrace rules.* sync\.transport = 'store'"):
        _open_handle(json.dumps([1, 3, 100]), CPU)


def test_with_a_stand_in_for_cuda_ipc_that_is_forbidden_the_error_says_what_to_do(monkeypatch):
    def forbidden(**arguments):
        raise RuntimeError("pidfd_getfd: Operation not permitted")

    monkeypatch.setattr(reductions, "rebuild_cuda_tensor", forbidden)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    handle = json.dumps([{"b": ""}, 512, 0, {"b": ""}, 0, {"b": ""}, True])
    with pytest.raises(SyncError, match=r"pidfd_getfd.*ptrace rules.*expandable_segments.*sync\.transport = 'store'"):
        _open_handle(handle, GPU)
