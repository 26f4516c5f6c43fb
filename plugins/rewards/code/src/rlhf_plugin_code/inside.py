"""Runs inside the sandbox: sets limits, then runs the program. The text of this file is passed to the interpreter with
``-c``.

Standard input holds one line with the size of the setup, the setup (a Python literal), and the program's own input.
Standard output gets one line with ``setup["nonce"]`` before the program begins. Then follows the program's output or,
for calls of functions, one line per call: ``NONCE NUMBER = JSON`` or ``NONCE NUMBER ! "why there is no answer"``. With
``setup["values"]``, the source of ``values.py``, arguments and answers are nodes instead of JSON.

The setup contains no expected value, so a program gains nothing by reading or changing anything here. This file imports
as little as possible, because every import costs time. The interpreter may be older than that of rlhf.
"""


def _main():  # type: ignore[no-untyped-def]
    import posix
    import sys

    # not sys.stdin, whose buffer would take the beginning of the program's own input
    def read(size):  # type: ignore[no-untyped-def]
        parts = b""
        while len(parts) < size:
            part = posix.read(0, size - len(parts))
            if not part:
                sys.exit("standard input ended before the program")
            parts += part
        return parts

    parent = posix.getppid()
    line = b""
    while not line.endswith(b"\n"):
        line += read(1)
    setup = eval(read(int(line)).decode(), {"__builtins__": {}})

    import resource

    for name, limit in setup["limits"].items():
        resource_id = getattr(resource, name)
        # a hard limit that was set outside, as by a container, cannot be raised
        hard_limit = resource.getrlimit(resource_id)[1]
        soft, hard = (value if hard_limit == resource.RLIM_INFINITY else min(value, hard_limit) for value in limit)
        resource.setrlimit(resource_id, (soft, hard))
    if setup["filter"]:
        import _ctypes  # importing the package ctypes takes as long as starting the interpreter

        class Length(_ctypes._SimpleCData):
            _type_ = "H"

        class Words(_ctypes._SimpleCData):
            _type_ = "z"

        class Filter(_ctypes.Structure):
            _fields_ = [("length", Length), ("words", Words)]

        prctl = _ctypes.dlsym(_ctypes.dlopen(None, 0), "prctl")
        words = Filter(len(setup["filter"]) // 8, setup["filter"])
        # PR_SET_PDEATHSIG with SIGKILL: no program outlives the launcher process. The filter keeps it set.
        if _ctypes.call_function(prctl, (1, 9, 0, 0, 0)) or posix.getppid() != parent:
            sys.exit("the launcher process has ended")
        # PR_SET_NO_NEW_PRIVS, then PR_SET_SECCOMP with SECCOMP_MODE_FILTER
        if any(_ctypes.call_function(prctl, c) for c in ((38, 1, 0, 0, 0), (22, 2, _ctypes.byref(words), 0, 0))):
            sys.exit("the filter of system calls cannot be set")

    calls = setup["calls"]
    builtins = sys.modules["builtins"]
    if not hasattr(builtins, "exit"):  # the module site, which is left out, defines them
        builtins.exit = builtins.quit = sys.exit
    name = "__main__" if calls is None else "solution"
    module = type(sys)(name)
    sys.modules[name] = module
    program = setup["program"]
    if program[:1] == "\ufeff":  # a byte-order mark, which Python accepts in a file and not in a text
        program = program[1:]

    class ProgramLoader:
        def get_source(self, name):  # type: ignore[no-untyped-def]
            return program

    module.__file__, module.__loader__ = "program.py", ProgramLoader()  # for inspect.getsource

    class SemLock:
        """Replaces the lock between processes that multiprocessing's thread pools need. There is no shared memory for
        it."""

        SEM_VALUE_MAX = 2**31 - 1

        def __init__(self, kind, value, maxvalue, name, unlink):  # type: ignore[no-untyped-def]
            import threading

            self.kind, self.maxvalue, self.name, self.handle = kind, maxvalue, None, 0
            self._lock = threading.Semaphore(value) if kind else threading.RLock()
            self.release = self._lock.release

        def acquire(self, block=True, timeout=None):  # type: ignore[no-untyped-def]
            return self._lock.acquire(block) if timeout is None else self._lock.acquire(block, timeout)

        def __enter__(self):  # type: ignore[no-untyped-def]
            return self.acquire()

        def __exit__(self, *error):  # type: ignore[no-untyped-def]
            self.release()

    locks = sys.modules["_multiprocessing"] = type(sys)("_multiprocessing")
    locks.SemLock, locks.sem_unlink, locks.flags = SemLock, None, {}
    sys.path = [folder for folder in sys.path if folder]
    sys.argv = ["program.py"]
    nonce = setup["nonce"].encode()
    write, as_text = posix.write, ascii
    if calls is not None:
        from _json import encode_basestring_ascii as quote

        # the program prints to /dev/null, so that no print stands between the answers
        answers = posix.dup(1)
        posix.dup2(posix.open("/dev/null", posix.O_WRONLY), 1)
        write(answers, nonce + b"\n")
    else:
        write(1, nonce + b"\n")
    nodes = {}
    exec(setup["values"], nodes)
    if setup["prelude"]:
        exec(compile(setup["prelude"], "prelude.py", "exec"), module.__dict__)
    exec(compile(program, "program.py", "exec"), module.__dict__)
    if calls is None:
        return

    def text(value):  # type: ignore[no-untyped-def]
        kind = type(value)
        if value is None:
            return "null"
        if kind is bool:
            return "true" if value else "false"
        if kind is int or (kind is float and value - value == 0):
            return kind.__repr__(value)
        if kind is str:
            return quote(value)
        if kind is list or kind is tuple:
            return "[" + ",".join([text(item) for item in value]) + "]"
        if kind is dict and all(type(key) is str for key in value):
            return "{" + ",".join([quote(key) + ":" + text(item) for key, item in value.items()]) + "}"
        raise TypeError("the answer holds a " + kind.__name__ + " that is not a JSON value")

    def function_named(name):  # type: ignore[no-untyped-def]
        if hasattr(module, name):
            return getattr(module, name)
        if hasattr(module, "Solution"):
            return getattr(module.Solution(), name)
        raise NameError("the program defines no function " + repr(name))

    for number, (name, arguments) in enumerate(calls):
        try:
            if nodes.get("pack"):
                arguments, keywords = nodes["unpack"](arguments, module.__dict__)
                answer = "= " + as_text(nodes["pack"](function_named(name)(*arguments, **keywords), module.__dict__))
            else:
                answer = "= " + text(function_named(name)(*arguments))
        except BaseException as error:
            reason = type(error).__name__
            try:  # noqa: SIM105 - contextlib takes time to import
                reason += ": " + str(error)[:200]
            except BaseException:
                pass
            answer = "! " + quote(reason)
        data = nonce + (" " + str(number) + " " + answer + "\n").encode()
        while data:
            data = data[write(answers, data) :]


_main()
