"""Documentation of a dataclass's fields, written once under each field and shown by help texts and reports."""

import ast
import inspect
import textwrap
from itertools import pairwise

_known: dict[type, dict[str, str]] = {}  # reading sources takes most of the time in which a command reads its options


def field_docs(kind: type) -> dict[str, str]:
    """The string under each field of a class and of its bases, by the field's name.

    Example::

        @dataclass
        class Config:
            width: int = 64
            '''Features of every layer.'''

        field_docs(Config)  # {"width": "Features of every layer."}
    """
    if kind not in _known:
        _known[kind] = _read_field_docs(kind)
    return _known[kind]


def _read_field_docs(kind: type) -> dict[str, str]:
    docs: dict[str, str] = {}
    for one in reversed(kind.__mro__):
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(one)))
        except (OSError, TypeError):  # built in, or without a file
            continue
        (statement,) = tree.body
        for field, after in pairwise(statement.body if isinstance(statement, ast.ClassDef) else ()):
            text = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else None
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, str):
                docs[field.target.id] = " ".join(text.split())
    return docs
