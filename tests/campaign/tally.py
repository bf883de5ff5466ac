"""Counts of what was tried, and what is needed to run a bad case again."""

import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

Problem = tuple[str, str]  # kind, such as "traceback", "exit code", "hang", "orphan" or "wrong numbers", and detail


@dataclass
class Tally:
    """Counts by group of cases."""

    progress: bool = False
    tried: Counter[str] = field(default_factory=Counter)
    bad: list[dict[str, str]] = field(default_factory=list)

    def add(self, group: str, case: str, problems: Iterable[Problem], again: str) -> None:
        """Count one case of a group, and print what is bad about it, with the command that runs it again."""
        self.tried[group] += 1
        for kind, detail in problems:
            self.bad.append({"group": group, "kind": kind, "case": case, "detail": detail, "again": again})
            print(f"bad: {group}, {kind}: {case}\n  {detail}\n  again: {again}", file=sys.stderr)
        if self.progress and sum(self.tried.values()) % 25 == 0:
            print(f"{sum(self.tried.values())} tried, {len(self.bad)} bad; {group}", flush=True)

    def _bad_cases(self, group: str) -> int:
        return len({(bad["group"], bad["case"], bad["again"]) for bad in self.bad if group in (bad["group"], "total")})

    def table(self) -> str:
        """One line for each group, and one for all."""
        lines = [f"{'group':<34}{'tried':>8}{'clean':>8}{'bad':>6}  kinds"]
        for group in [*sorted(self.tried), "total"]:
            tried = self.tried[group] if group != "total" else sum(self.tried.values())
            bad = self._bad_cases(group)
            kinds = Counter(entry["kind"] for entry in self.bad if group in (entry["group"], "total"))
            shown = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
            lines.append(f"{group:<34}{tried:>8}{tried - bad:>8}{bad:>6}  {shown}")
        return "\n".join(lines)
