"""Results as values, printed as tables or JSON."""

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from msgspec import Struct, field

Status = Literal["passed", "failed", "unsupported", "begun"]


class Result(Struct, frozen=True):
    """One implementation on one trial. ``detail`` says what is wrong, or why it is not supported.

    ``begun`` is heard before a trial runs, and is in no report.
    """

    op: str
    implementation: str
    label: str
    status: Status
    detail: str = ""

    @property
    def id(self) -> str:
        """Prints, and filters: ``OP[implementation](label)``."""
        return result_id(self.op, self.implementation, self.label)


def result_id(op: str, implementation: str, label: str) -> str:
    """``OP[implementation](label)``."""
    return f"{op}[{implementation}]({label})"


class Report(Struct):
    """All results. ``missing`` names ops for which there is no trial; ``lost`` says why the run could not go on."""

    results: list[Result] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    lost: str = ""

    @property
    def untested(self) -> list[str]:
        """``OP[implementation]`` of everything that no trial exercised: silence is no proof."""
        rows = self._rows()
        return [f"{op}[{name}]" for (op, name), row in rows.items() if not row["passed"] and not row["failed"]]

    @property
    def ok(self) -> bool:
        """Something was tested, nothing failed, nothing was left out."""
        return bool(self.results) and not (self.lost or self.missing or self.untested or self.failures)

    @property
    def failures(self) -> list[Result]:
        """Every failed result."""
        return [result for result in self.results if result.status == "failed"]

    def table(self) -> str:
        """One line an implementation with its counts and, when it supports nothing, its reasons; then every failure."""
        lines = [f"{'op':<24} {'implementation':<32} {'passed':>7} {'failed':>7} {'unsupported':>12}"]
        for (op, name), row in self._rows().items():
            lines.append(f"{op:<24} {name:<32} {row['passed']:>7} {row['failed']:>7} {row['unsupported']:>12}")
        lines += [f"FAILED {result.id}\n       {result.detail}" for result in self.failures]
        for name in self.untested:
            reasons = _reasons(r for r in self.results if f"{r.op}[{r.implementation}]" == name)
            lines.append(f"UNTESTED {name}: no trial is supported ({'; '.join(reasons)})")
        lines += [f"MISSING there is no trial of {op}" for op in self.missing]
        if self.lost:
            lines.append(f"LOST {self.lost}")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """For JSON: the verdict, every failure, and the counts of each implementation with its reasons."""
        return {
            "ok": self.ok,
            "lost": self.lost,
            "missing": self.missing,
            "untested": self.untested,
            "failures": [{"id": result.id, "detail": result.detail} for result in self.failures],
            "implementations": [
                {
                    "op": op, "implementation": name, **row,
                    "reasons": _reasons(r for r in self.results if (r.op, r.implementation) == (op, name)),
                }
                for (op, name), row in self._rows().items()
            ],
        }  # fmt: skip

    def _rows(self) -> dict[tuple[str, str], dict[Status, int]]:
        rows: dict[tuple[str, str], dict[Status, int]] = {}
        for result in self.results:
            row = rows.setdefault((result.op, result.implementation), {"passed": 0, "failed": 0, "unsupported": 0})
            row[result.status] += 1
        return dict(sorted(rows.items()))


def joined(reports: Iterable[Report]) -> Report:
    """One report of what several processes tried."""
    parts = list(reports)
    return Report(
        [result for report in parts for result in report.results],
        sorted({name for report in parts for name in report.missing}),
        "; ".join(report.lost for report in parts if report.lost),
    )


def _reasons(results: Iterable[Result]) -> list[str]:
    """Distinct reasons of refusals, in order of first appearance."""
    return list(dict.fromkeys(result.detail for result in results if result.status == "unsupported"))


class Timing(Struct, frozen=True):
    """One implementation timed. ``nbytes`` are the bytes that must move at least once, ``flops`` what the op counts (0: not told).

    ``bandwidth_share`` is nbytes / time over the machine's bandwidth, when that is known.
    """

    id: str
    launches: int
    microseconds: float
    nbytes: int
    flops: int
    bandwidth_share: float | None

    def as_dict(self) -> Mapping[str, Any]:
        """For JSON."""
        return {
            "id": self.id, "launches": self.launches, "microseconds": self.microseconds, "bytes": self.nbytes,
            "gbps": self.gbps, "flops": self.flops, "gflops": self.gflops, "bandwidth_share": self.bandwidth_share,
        }  # fmt: skip

    @property
    def gbps(self) -> float:
        """Gigabytes (10^9) a second."""
        return self.nbytes / self.microseconds / 1e3

    @property
    def gflops(self) -> float:
        """10^9 operations a second."""
        return self.flops / self.microseconds / 1e3

    def __str__(self) -> str:
        share = "" if self.bandwidth_share is None else f" {self.bandwidth_share:6.1%} of bandwidth"
        compute = f" {self.gflops:9.1f} GFLOP/s" if self.flops else ""
        return f"{self.microseconds:10.2f} µs {self.gbps:8.1f} GB/s{share}{compute}  {self.id}"
