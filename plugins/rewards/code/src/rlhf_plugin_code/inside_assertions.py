"""Runs inside the sandbox, instead of a program: evaluates the assertions of a row. It runs no code of the policy.

Each function of the program is replaced by an object that looks up its calls in the answers. At a call without an
answer, the test stops and the call is reported. The assertions are evaluated again when the program has answered it.

Standard input holds the setup (a Python literal), standard output gets one JSON object: a verdict for each test and the
calls without an answer. The source of ``values.py`` stands before this text.
"""


def _evaluate():  # type: ignore[no-untyped-def]
    import ast
    import builtins
    import collections
    import contextlib
    import json
    import os
    import random
    import sys

    setup = ast.literal_eval(sys.stdin.read())
    output = os.dup(1)
    os.dup2(os.open("/dev/null", os.O_WRONLY), 1)  # for tests that print
    random.seed(0)  # so that every evaluation makes the same calls
    answers, calls, verdicts = setup["answers"], {}, {}
    namespace = {"__name__": "tests"}
    classes = collections.ChainMap({}, namespace)  # the program adds to the first: it hides no name of the tests
    counts = {"unanswered": 0}
    QUIET = ("StopIteration", "StopAsyncIteration")  # they would end a loop of a test instead of failing it
    last = [""]

    class Unanswered(BaseException):
        """The program has not answered this call yet."""

    class NoAnswer(BaseException):
        """(word, why): no exception that a test may expect."""

    class Function:
        def __init__(self, name):  # type: ignore[no-untyped-def]
            self.name = name

        def __call__(self, *arguments, **keywords):  # type: ignore[no-untyped-def]
            call = (self.name, ascii(pack((arguments, keywords), classes)))  # noqa: F821
            if call not in answers:
                calls[call] = None
                counts["unanswered"] += 1
                raise Unanswered
            word, text = answers[call]
            if word == "returned":
                try:
                    value = unpack(ast.literal_eval(text), classes)  # noqa: F821
                except Exception:
                    raise NoAnswer("error", "an answer that is not a value") from None
                last[0] = self.name + "() returned " + describe(value)
                return value
            if word == "raised":
                name, _, message = text.partition(": ")
                kind = getattr(builtins, name, None)
                if isinstance(kind, type) and issubclass(kind, Exception) and name not in QUIET:
                    raise kind(message)
                word = "error"
            raise NoAnswer(word, text)

    class Test:
        def __init__(self, number):  # type: ignore[no-untyped-def]
            self.number = number

        def __enter__(self):  # type: ignore[no-untyped-def]
            self.unanswered, last[0] = counts["unanswered"], ""

        def __exit__(self, kind, error, trace):  # type: ignore[no-untyped-def]
            # a failure after an unanswered call may be caused by its missing result
            count = self.unanswered if error is None else 0
            verdicts[self.number] = verdict(error, counts["unanswered"] > count)
            return True

    def describe(value):  # type: ignore[no-untyped-def]
        try:
            return repr(value)[:60]
        except Exception:  # a class of the tests, a long integer, a deep list: only a message is lost
            return "a value that cannot be shown"

    def verdict(error, unanswered):  # type: ignore[no-untyped-def]
        if unanswered:
            return ("unanswered", "")
        if error is None:
            return ("passed", "")
        if isinstance(error, NoAnswer):
            return error.args
        if isinstance(error, AssertionError):
            return ("wrong", last[0] or "the assertion does not hold")
        return ("error", type(error).__name__ + ": " + str(error)[:200])

    def is_test(statement):  # type: ignore[no-untyped-def]
        kinds = (ast.Assert, ast.Expr, ast.For, ast.While, ast.With, ast.Try, ast.If)
        return isinstance(statement, kinds) and any(
            (isinstance(node, ast.Assert) and not isinstance(node.test, ast.Constant))
            or (isinstance(node, ast.Name) and node.id in functions)
            for node in ast.walk(statement)
        )

    def run(tree):  # type: ignore[no-untyped-def]
        for node in ast.walk(tree):  # the calls of all passes of a loop become known together
            if isinstance(node, ast.For):
                handler = ast.ExceptHandler(ast.Name("_Unanswered", ast.Load()), None, [ast.Pass()])
                node.body = [ast.Try(node.body, [handler], [], [])]
        exec(compile(ast.fix_missing_locations(tree), "tests.py", "exec"), namespace)

    exec(compile(setup["prelude"], "prelude.py", "exec"), namespace)
    namespace.update(_Unanswered=Unanswered, _Test=Test)
    setup_tree, trees = ast.parse(setup["before"]), [ast.parse(text) for text in setup["tests"]]
    nodes = [node for tree in (setup_tree, *trees) for node in ast.walk(tree)]
    names = [node for node in nodes if isinstance(node, ast.Name)]
    bound = {node.id for node in names if not isinstance(node.ctx, ast.Load)}
    bound |= {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    bound |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    bound |= {(node.asname or node.name).partition(".")[0] for node in nodes if isinstance(node, ast.alias)}
    functions = {node.id for node in names} - bound - set(namespace) - set(dir(builtins))
    callees = {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    for name in (functions - callees) & set(getattr(sys, "stdlib_module_names", ())):  # imported by the program
        functions.remove(name)
        namespace[name] = __import__(name)
    entry = setup["entry_point"]
    if entry:
        functions.add(entry)
    if not functions:  # a function of the program that is called as one of Python
        functions = callees - bound
    namespace.update((name, Function(name)) for name in functions)
    if "Solution" in functions:
        namespace["Solution"] = type("Solution", (), {"__getattr__": lambda self, name: Function(name)})
    size = len(trees)
    checks = []
    if not setup["apart"]:  # the statements of the text, or of its function check(), are the tests
        checks = [node for node in trees[0].body if isinstance(node, ast.FunctionDef) and node.name == "check"]
        if checks:
            functions |= {argument.arg for argument in checks[0].args.args}
        body = checks[0].body if checks else trees[0].body
        size = 0
        for index, statement in enumerate(body):
            if is_test(statement):
                call = ast.Call(ast.Name("_Test", ast.Load()), [ast.Constant(size)], [])
                body[index] = ast.With([ast.withitem(call, None)], [statement])
                size += 1
    rest = ("error", "the test was not reached")
    try:
        run(setup_tree)
        for number, tree in enumerate(trees):
            with Test(number) if setup["apart"] else contextlib.nullcontext():
                run(tree)
        if checks:
            namespace["check"](Function(entry))
    except BaseException as error:
        rest = verdict(error, counts["unanswered"] > 0)
    listing = [verdicts.get(number, rest) for number in range(size)]
    with open(output, "w") as file:
        json.dump({"verdicts": listing, "calls": list(calls)}, file)


_evaluate()
