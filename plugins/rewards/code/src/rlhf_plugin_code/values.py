"""Arguments and results of functions as lists of plain nodes. Runs inside the sandbox, also in an older interpreter.

The first node is the whole value. A node is None, a bool, int, float, complex, str or bytes, or ``(kind, start,
count)``: a container whose items are ``count`` nodes from number ``start``, which is larger than its own number. So a
long linked list needs no recursion. The items of a dictionary are its keys and values in turn. For an object of a class
of the program or of the tests, the kind is the class name and the items are its attributes in the same way.
``(kind, text, 0)`` is a number without a literal (:data:`LITERALS`), or ``("type", name, 0)`` one of Python's types.

Subclasses become their base. An object gets the methods of the reader's class of the same name, or none: the reader of
nodes runs no code of their writer.
"""

KINDS = {kind.__name__: kind for kind in (list, tuple, set, frozenset, dict)}
TYPES = dict(KINDS, **{kind.__name__: kind for kind in (bool, int, float, complex, str, bytes)})
LITERALS = {"float": float, "complex": complex, "int": lambda text: int(text, 16), "type": TYPES.__getitem__}
"""{kind: the value of its text}, for infinity, NaN and integers of many digits, which newer interpreters do not read or
write as decimal numbers."""
LONG_BITS = 10_000
"""Bits of an integer from which on it is written in hexadecimal form. The limit for decimal numbers is 4300 digits."""
MAX_NODES = 500_000
"""Largest number of nodes of one value, because a list that contains itself is endless."""


def pack(value, classes):  # type: ignore[no-untyped-def]
    """The nodes of a value. Raises TypeError for objects of classes that are not in ``classes`` ({name: class})."""
    nodes, todo = [None], [(0, value)]
    while todo:
        index, value = todo.pop()
        if value is None or type(value) in (bool, bytes):
            nodes[index] = value
        # the methods of the base class, because a subclass of the program may override them
        elif isinstance(value, int):
            number = int.__add__(value, 0)
            nodes[index] = number if number.bit_length() < LONG_BITS else ("int", hex(number), 0)
        elif type(value) is complex:
            nodes[index] = value if value - value == 0 else ("complex", repr(value), 0)
        elif isinstance(value, str):
            nodes[index] = str.__add__(value, "")
        elif isinstance(value, float):
            number = float.__mul__(value, 1.0)
            nodes[index] = number if number - number == 0 else ("float", repr(number), 0)
        elif isinstance(value, type) and TYPES.get(value.__name__) is value:
            nodes[index] = ("type", value.__name__, 0)
        else:
            kind = next((name for name, kind in KINDS.items() if isinstance(value, kind)), None)
            if kind is None:
                kind = type(value).__name__
                if classes.get(kind) is not type(value):
                    raise TypeError("a value holds a " + kind + ", which cannot leave its process")
                items = [part for pair in vars(value).items() for part in pair]
            elif kind == "dict":
                items = [part for pair in dict.items(value) for part in pair]
            else:
                items = list(KINDS[kind].__iter__(value))
            start = len(nodes)
            if start + len(items) > MAX_NODES:
                raise TypeError("a value is too large, or contains itself")
            nodes[index] = (kind, start, len(items))
            nodes += [None] * len(items)
            todo += zip(range(start, len(nodes)), items)  # noqa: B905 - an argument of newer interpreters
    return nodes


def unpack(nodes, classes):  # type: ignore[no-untyped-def]
    """The value that the nodes represent. A class that ``classes`` lacks is added, without methods.

    Raises some Exception for nodes that represent no value.
    """
    values = list(nodes)
    for index in reversed(range(len(nodes))):
        if type(nodes[index]) is not tuple:
            continue
        kind, start, count = nodes[index]
        if kind in LITERALS:
            values[index] = LITERALS[kind](start)
            continue
        if start <= index:
            raise ValueError("a node is its own item")
        items = values[start : start + count]
        pairs = zip(items[::2], items[1::2])  # noqa: B905
        if kind == "dict":
            values[index] = dict(pairs)
        elif kind in KINDS:
            values[index] = KINDS[kind](items)
        else:
            if not isinstance(classes.get(kind), type):
                classes[kind] = type(kind, (), {"__module__": classes["__name__"]})
            cls = classes[kind]
            if cls.__module__ != classes["__name__"]:  # not one of a library
                raise TypeError(kind)
            values[index] = cls.__new__(cls)
            values[index].__dict__.update(pairs)
    return values[0]
