"""The command line: one module a command, each a frozen dataclass of options with a ``run`` that does the work."""
