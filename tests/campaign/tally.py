"""Counts of what was tried, and what is needed to run a bad case again."""

import json
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

# What can be wrong with a case.
KINDS = ("traceback", "exit code", "message", "output", "wrong numbers", "hang", "memory", "crash", "orphan", "lost")


@dataclass(frozen=True)
class Bad:
    """One bad case: ``again`` is the command that runs it again."""

    group: str
    kind: str  # one of KINDS
    case: str
    detail: str
    again: str


@dataclass
class Tally:
    """Counts by group of cases."""

    tried: dict[str, int] = field(default_factory=dict)
    bad: list[Bad] = field(default_factory=list)

    def add(self, group: str, found: Iterable[Bad] = ()) -> None:
        """Count one case of a group, and print what is bad about it."""
        self.tried[group] = self.tried.get(group, 0) + 1
        for one in found:
            self.bad.append(one)
            print(f"bad: {one.group}, {one.kind}: {one.case}\n  {one.detail}\n  again: {one.again}", file=sys.stderr)

    def join(self, other: "Tally") -> None:
        """Add the counts of another tally."""
        for group, count in other.tried.items():
            self.tried[group] = self.tried.get(group, 0) + count
        self.bad += other.bad

    def table(self) -> str:
        """One line for each group, and one for all."""
        lines = [f"{'group':<34}{'tried':>8}{'clean':>8}{'bad':>6}  kinds"]
        for group in [*sorted(self.tried), "total"]:
            mine = [one for one in self.bad if group in (one.group, "total")]
            tried = sum(self.tried.values()) if group == "total" else self.tried[group]
            cases = len({(one.group, one.again) for one in mine})
            kinds = {kind: sum(one.kind == kind for one in mine) for kind in KINDS}
            shown = ", ".join(f"{count} {kind}" for kind, count in kinds.items() if count)
            lines.append(f"{group:<34}{tried:>8}{tried - cases:>8}{cases:>6}  {shown}")
        return "\n".join(lines)

    def write(self, path: Path, **about: object) -> None:
        """Write the counts and every bad case as JSON."""
        cases = {(one.group, one.again) for one in self.bad}
        groups = {
            name: {"tried": tried, "bad": sum(group == name for group, _ in cases)}
            for name, tried in sorted(self.tried.items())
        }
        counts = {"tried": sum(self.tried.values()), "clean": sum(self.tried.values()) - len(cases), "bad": len(cases)}
        found = about | counts | {"groups": groups, "cases": [asdict(one) for one in self.bad]}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found, indent=2) + "\n")
