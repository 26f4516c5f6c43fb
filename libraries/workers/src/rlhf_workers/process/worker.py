"""The worker: one rank of a role, or one engine, in a separate process.

Importing this module does not import torch, because the number of threads must be set first.
"""

from __future__ import annotations

import faulthandler
import ipaddress
import os
import platform
import socket
import struct
import sys
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from rlhf.process_memory import peak_memory

from rlhf_workers.process.failure import Failure

if TYPE_CHECKING:
    from rlhf_workers.links.ends import ConnectedTrainer
    from rlhf_workers.links.link import Link
    from rlhf_workers.process.payload import Payload


_SIOCGIFADDR = 0x8915
"""Linux request code: the IPv4 address of an interface."""


def reserve_port(address: str) -> socket.socket:
    """Reserve a TCP port of ``address`` until the returned socket is closed. The system does not assign the port to
    processes that request any free port. A process that names the port can listen on it with SO_REUSEADDR, which
    servers set."""
    family = socket.AF_INET6 if ipaddress.ip_address(address).version == 6 else socket.AF_INET
    reservation = socket.socket(family, socket.SOCK_STREAM)
    reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reservation.bind((address, 0))
    return reservation


def interface_of(address: str) -> str:
    """The network interface that has this IPv4 address, ``lo`` for loopback; empty if it is unknown. Gloo needs the
    name. By default Gloo uses the interface of the host name, which may not belong to the cluster."""
    try:
        import fcntl
    except ImportError:  # not on this system
        return ""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has no IPv4 address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return ""


COMPARED = ("torch", "transformers", "rlhf-core")
"""Distributions that must have the same version on every node, like Python and the run's plugins."""
OWN_METHODS = frozenset({"connect_trainer", "send_buckets", "advance", "peak_memory"})
"""Methods of :class:`Worker` that the driver calls like methods of the component."""
CHUNK_SECONDS = 0.02
"""Samples that finish within this time are sent to the driver together."""


class Worker(ABC):
    """One thread runs its methods, one at a time; a second thread runs :meth:`pulse` and :meth:`stacks`.

    Exceptions are returned as :class:`Failure`, so a call without an answer means a dead process.
    """

    def __init__(self, name: str, folder: str, env: Mapping[str, str], devices: Sequence[str] | None) -> None:
        """``devices``: ids of the visible GPUs; None if there are no GPUs."""
        faulthandler.enable()
        self.name = name
        os.environ.update(env)
        if devices is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
        self._reserved_port: socket.socket | None = None
        self._connected: ConnectedTrainer | None = None
        self._progress = 0
        self._call, self._start, self._thread = "", 0.0, 0
        if os.path.isdir(folder):  # so that relative paths mean the same as on the driver
            os.chdir(folder)
            if folder not in sys.path:
                sys.path.append(folder)

    def __repr__(self) -> str:
        return self.name

    # -------------------------------------------------------------------------------------- start

    @abstractmethod
    def address(self) -> str:
        """The address of this node at which other ranks reach this rank."""

    def describe(self, plugins: bytes, manifest: Sequence[Mapping[str, str]]) -> dict[str, Any]:
        """Resolve the run's plugins here. Returns the address, the versions, and ``problem``: Failure or None."""
        import cloudpickle
        from rlhf.plugins import Plugins

        address = self.address()
        if interface := interface_of(address):
            # A value that the user has set, for example in launcher.env, is kept.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        problem = None
        try:
            Plugins.discover().verify(manifest)
            cloudpickle.loads(plugins)  # plugins from files; their classes can be unpickled after this
        except Exception as error:
            problem = Failure.of(error)
        versions = {"python": platform.python_version()}
        return {
            "address": address,
            "pid": os.getpid(),
            "stderr": os.readlink("/proc/self/fd/2") if os.path.exists("/proc/self/fd/2") else "",
            "versions": versions | {name: installed_version(name) for name in COMPARED},
            "problem": problem,
        }

    def rendezvous(self) -> str:
        """``tcp://HOST:PORT`` on this node. The port stays reserved until this process ends: a model may load
        for minutes before a process listens, and a component may join its group in a later call."""
        address = self.address()
        host = f"[{address}]" if ":" in address else address
        self._reserved_port = reserve_port(address)
        return f"tcp://{host}:{self._reserved_port.getsockname()[1]}"

    def build(self, payload: Payload, rank: int) -> Failure | None:
        """Create the component: ``cls(config, spec)``."""
        from rlhf_workers.process.payload import unpack

        with self._at_work("start"):
            try:
                cls, config, spec = unpack(payload, rank)
                self.component = cls(config, spec)
            except Exception as error:
                return Failure.of(error)
        return None

    # --------------------------------------------------------------------------------------- work

    def call(self, method: str, payload: Payload | None, rank: int) -> Payload | Failure | None:
        """Call the method; returns its result as a payload for one rank."""
        from rlhf_workers.process.payload import pack, unpack

        with self._at_work(method):
            try:
                return pack([(self._method(method)(*unpack(payload, rank)),)])
            except Exception as error:
                return Failure.of(error)

    def stream(self, method: str, payload: Payload | None, rank: int) -> Iterator[Any]:
        """Yield each item of the method, then None, after which the item is safe in the store. A Failure instead of
        None ends the stream, and the item before it must be ignored."""
        with self._at_work(method):
            try:
                for item in self._items(method, payload, rank):
                    yield item
                    yield None
            except Exception as error:
                yield None
                yield Failure.of(error)

    def drain(self, method: str, payload: Payload | None, rank: int) -> Failure | None:
        """Run the method to its end and drop its items, on a rank whose items are not needed."""
        with self._at_work(method):
            try:
                for _ in self._items(method, payload, rank):
                    pass
            except Exception as error:
                return Failure.of(error)
        return None

    def generate(self, payload: Payload, rank: int) -> Iterator[list[tuple[int, Any]] | Failure]:
        """Yield (position, turn) of samples as they finish, in small groups."""
        from rlhf_workers.process.payload import unpack

        with self._at_work("generate"):
            try:
                finished, last_yield = [], time.monotonic()
                for sample in self.component.generate(*unpack(payload, rank)):
                    self._progress += 1
                    finished.append(sample)
                    if time.monotonic() - last_yield >= CHUNK_SECONDS:
                        yield finished
                        finished, last_yield = [], time.monotonic()
                if finished:
                    yield finished
            except Exception as error:
                yield Failure.of(error)

    def _items(self, method: str, payload: Payload | None, rank: int) -> Iterator[Any]:
        from rlhf_workers.process.payload import unpack

        for item in self._method(method)(*unpack(payload, rank)):
            self._progress += 1
            yield item

    def _method(self, name: str) -> Callable[..., Any]:
        method: Callable[..., Any] = getattr(self if name in OWN_METHODS else self.component, name)
        return method

    def connect_trainer(self, link: Link) -> None:
        """Connect this rank of a trainer to ``link``, in place of an earlier link."""
        from rlhf_workers.links.ends import ConnectedTrainer

        if self._connected is not None:
            self._connected.close()
        self._connected = ConnectedTrainer(self.component, link)

    def send_buckets(self, view: str, limit: int) -> Iterator[Any]:
        """The trainer's buckets. Over a link: their headers, while the bytes travel."""
        if self._connected is None:
            return self.component.buckets(view, limit)
        return self._connected.send_buckets(view, limit)

    def advance(self, *arguments: Any) -> tuple[list[tuple[int, Any]], int]:
        """The finished turns, and the number of tokens so far of the unfinished ones."""
        return self.component.advance(*arguments), self.component.unfinished_tokens()

    def peak_memory(self) -> dict[str, int]:
        return peak_memory()

    @contextmanager
    def _at_work(self, method: str) -> Iterator[None]:
        self._progress += 1
        self._call, self._start, self._thread = method, time.monotonic(), threading.get_ident()
        try:
            yield
        finally:
            self._progress += 1
            self._call = ""

    # -------------------------------------------------------------- in the second thread, at any time

    def pulse(self) -> int:
        """A counter that grows with every call, item and sample."""
        return self._progress

    def stacks(self) -> dict[str, str]:
        """The stack of each Python thread except this one. ``work`` is the thread that serves calls. The key ``""`` has
        the active call and the processor time that this process has used."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        stacks = {}
        for ident, frame in sys._current_frames().items():
            if ident != threading.get_ident():
                name = "work" if ident == self._thread else names.get(ident, f"thread {ident}")
                stacks[name] = "".join(traceback.format_stack(frame)).rstrip()
        doing = f"in {self._call}() for {time.monotonic() - self._start:.0f} s" if self._call else "between two calls"
        return {"": f"{doing}; {time.process_time():.2f} s of processor time so far", **stacks}


def installed_version(distribution: str) -> str:
    """The version of a distribution in this process, or ``not installed``."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed"
