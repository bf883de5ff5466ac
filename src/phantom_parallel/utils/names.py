"""Names that a user mistyped, and those that there are."""

import difflib
from collections.abc import Iterable


def choose_from(wrong: str, known: Iterable[str]) -> str:
    """The end of an error message: the name that is closest to ``wrong``, if one is close, and all of them."""
    names = list(known)
    near = difflib.get_close_matches(wrong, names, n=1)
    return f"did you mean {near[0]!r}? There are {', '.join(names)}" if near else f"there are {', '.join(names)}"
