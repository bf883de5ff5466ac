"""Errors that end the work of several ranks. They keep their type on the way from a rank to its launcher."""


class RankDied(RuntimeError):
    """A rank failed or did not answer, and the other ranks were stopped."""


class Interrupted(RuntimeError):
    """The work was stopped by SIGINT or SIGTERM."""


class LossDiverged(RuntimeError):
    """The loss or a weight is not finite."""
