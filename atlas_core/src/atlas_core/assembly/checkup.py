"""What the facts about a machine mean for serving: findings with cures. Pure; ``doctor`` gathers the facts."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from msgspec import Struct, field

from atlas_core.plugins import PluginRecord
from atlas_core.vocab.errors import AtlasError
from atlas_core.vocab.resolve import EQUAL
from atlas_core.vocab.verdict import Verdict

Level = Literal["ok", "warn", "fail"]

LOW_MEMORY = 1 << 30
"""Bytes; less than this is hardly enough for the smallest model and its cache."""
LOW_DISK = 1 << 30
"""Bytes; most models are larger than this."""
_LOOPBACK = ("localhost", "127.0.0.1")


class Finding(Struct, frozen=True):
    """``check`` names what was looked at. ``fail``: serving cannot work until it is cured; ``warn``: something else may not."""

    check: str
    level: Level
    what: str
    why: str = ""
    cure: str = ""

    @classmethod
    def of(cls, check: str, level: Level, error: AtlasError) -> "Finding":
        """The finding that an error is."""
        return cls(check, level, error.what, error.why, error.cure)


class HardwareFacts(Struct, frozen=True):
    """One hardware plugin. ``probed`` is its probe's verdict.

    The rest is known of present machines only: ``modules`` kernels for ``arch``, ``unusable`` ones of them with the reason, the
    ``build`` command, the ``compiler`` (or what its search said), and ``broken``, the error that kept all this from being found out.
    """

    name: str
    dist: str
    probed: Verdict
    arch: str = ""
    modules: int = 0
    unusable: Mapping[str, str] = field(default_factory=dict)
    build: str = ""
    compiler: str | AtlasError = ""
    broken: AtlasError | None = None


class ModelFacts(Struct, frozen=True):
    """The model that was asked about: on this disk or not, and the error that serving it would end with, if any."""

    name: str
    path: str | None
    target: str = ""
    error: AtlasError | None = None


class StartFacts(Struct, frozen=True):
    """Where starts are kept, how many there are, and why none can be written there; empty when they can."""

    folder: str
    count: int
    error: str


class Facts(Struct, frozen=True):
    """Everything that was looked at. Sizes are bytes, None where the system does not tell.

    ``conflict`` is what keeps the plugins from being used together; ``settings`` what is wrong with flags, variables or file. Where one
    hardware was asked for, ``hardware`` is that alone, and ``asked`` true.
    ``cache`` is Atlas's directory, ``cache_error`` why nothing can be written there. ``port_error`` is why ``address`` cannot be
    listened on. ``proxies`` maps schemes to hosts, without user names and passwords. ``starts`` is None where none are kept.
    """

    plugins: Sequence[PluginRecord]
    conflict: AtlasError | None
    settings: AtlasError | None
    hardware: Sequence[HardwareFacts]
    families: Sequence[str]
    model: ModelFacts | None
    cache: str
    cache_error: str
    cache_free: int | None
    memory_free: int | None
    address: str
    port_error: AtlasError | None
    token: bool
    offline: bool
    proxies: Mapping[str, str]
    no_proxy: str
    asked: bool = False
    starts: StartFacts | None = None


def check(facts: Facts) -> list[Finding]:
    """Every finding, in the order in which a start would meet them."""
    return [
        *_settings(facts), *_plugins(facts), *_machines(facts), *_families(facts), *_model(facts), *_places(facts), *_network(facts),
    ]  # fmt: skip


def healthy(findings: Sequence[Finding]) -> bool:
    """Whether serving can work."""
    return all(finding.level != "fail" for finding in findings)


def _settings(facts: Facts) -> Iterator[Finding]:
    if facts.settings is not None:
        yield Finding.of("settings", "fail", facts.settings)


def _plugins(facts: Facts) -> Iterator[Finding]:
    if facts.conflict is not None:
        yield Finding.of("plugins", "fail", facts.conflict)
    sound: dict[str, list[str]] = {}
    for record in facts.plugins:
        what = f"{record.group} {record.key} from {record.owner}"
        if record.status == "ok":
            sound.setdefault(record.group, []).append(record.key)
        elif record.status == "broken":
            yield Finding(
                "plugin", "warn", f"{what} is broken", record.reason,
                f"repair or uninstall {record.dist}; atlas plugins list tells more",
            )  # fmt: skip
        else:
            yield Finding("plugin", "ok", f"{what} is left out", record.reason)
    for group, keys in sound.items():
        yield Finding("plugins", "ok", f"{group.removeprefix('atlas.')}: {', '.join(keys)}")


def _machines(facts: Facts) -> Iterator[Finding]:
    present = [machine for machine in facts.hardware if machine.probed.ok]
    best = max((machine.probed.rank for machine in present), default=0)
    for machine in facts.hardware:
        if not machine.probed.ok:
            # Not a fault: plugins for machines that are elsewhere may be installed everywhere.
            yield Finding("hardware", "ok", f"{machine.name} is not here", ", ".join(machine.probed.reasons))
            continue
        yield Finding("hardware", "ok", f"{machine.name} is here", ", ".join(machine.probed.reasons))
        yield from _kernels(machine, "fail" if machine.probed.rank == best else "warn")
    reasons = "; ".join(f"{m.name}: {', '.join(m.probed.reasons)}" for m in facts.hardware)
    if not present and facts.asked:
        yield Finding(
            "hardware", "fail", f"{facts.hardware[0].name} was asked for and is not here", reasons,
            "name another with --hardware, or none, for the best one that is here",
        )  # fmt: skip
    elif not present:
        yield Finding(
            "hardware", "fail", "no hardware is usable", reasons or "no hardware plugin is installed",
            "install a hardware plugin for this machine, for instance atlas-plugin-cpu",
        )  # fmt: skip
    rivals = [machine.name for machine in present if machine.probed.rank == best]
    if len(rivals) > 1:
        yield Finding(
            "hardware", "fail", f"{rivals[0]} and {rivals[1]} both answer with rank {best}", EQUAL,
            "name one with --hardware, or have the probe of one answer with a higher rank",
        )  # fmt: skip


def _kernels(machine: HardwareFacts, level: Level) -> Iterator[Finding]:
    if machine.broken is not None:
        yield Finding.of("kernels", level, machine.broken)
        return
    usable = not machine.unusable
    if usable:
        yield Finding("kernels", "ok", f"{machine.name}: {machine.modules} modules built for {machine.arch}")
    else:
        reasons = list(machine.unusable.values())
        more = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
        yield Finding(
            "kernels", level, f"{machine.name}: {len(reasons)} of {machine.modules} modules cannot be used on {machine.arch}",
            f"{reasons[0]}{more}", f"Run: {machine.build}",
        )  # fmt: skip
    if isinstance(machine.compiler, AtlasError):
        needed = level if not usable else "warn"
        yield Finding.of("compiler", needed, machine.compiler)
    else:
        yield Finding("compiler", "ok", f"{machine.name}: {machine.compiler}", "needed to build kernels, not to serve")


def _families(facts: Facts) -> Iterator[Finding]:
    if not facts.families:
        yield Finding(
            "models", "fail", "no model family is installed", "a checkpoint means something to its family's plugin only",
            "install a model plugin, for instance atlas-model-llama",
        )  # fmt: skip


def _model(facts: Facts) -> Iterator[Finding]:
    model = facts.model
    if model is None:
        return
    if model.error is not None:
        yield Finding.of("model", "fail", model.error)
    elif model.path is None:
        level: Level = "fail" if facts.offline else "warn"
        yield Finding(
            "model", level, f"{model.name} is not on this disk",
            "HF_HUB_OFFLINE forbids to fetch it" if facts.offline else "atlas serve will fetch it first",
            "unset HF_HUB_OFFLINE, or put it there" if facts.offline else "",
        )  # fmt: skip
    else:
        yield Finding("model", "ok", f"{model.name} can be served as {model.target}", f"it is at {model.path}")


def _places(facts: Facts) -> Iterator[Finding]:
    if facts.cache_error:
        yield Finding(
            "cache",
            "fail",
            f"{facts.cache} cannot be written",
            facts.cache_error,
            "correct who may write, or set XDG_CACHE_HOME",
        )
    elif facts.cache_free is not None and facts.cache_free < LOW_DISK:
        yield Finding(
            "cache", "warn", f"{facts.cache} has little room", f"{facts.cache_free >> 20} MiB are free",
            "make room, or set XDG_CACHE_HOME and HF_HOME to another disk",
        )  # fmt: skip
    else:
        room = "" if facts.cache_free is None else f"{facts.cache_free / 2**30:.1f} GiB are free"
        yield Finding("cache", "ok", f"{facts.cache} can be written", room)
    yield _starts(facts.starts)
    if facts.memory_free is not None and facts.memory_free < LOW_MEMORY:
        yield Finding(
            "memory",
            "warn",
            "little memory is free",
            f"{facts.memory_free >> 20} MiB",
            "end other programs, or lower --max-seq-len",
        )
    elif facts.memory_free is not None:
        yield Finding("memory", "ok", f"{facts.memory_free / 2**30:.1f} GiB of memory are free")
    if facts.port_error is not None:
        yield Finding.of("port", "fail", facts.port_error)
    else:
        yield Finding("port", "ok", f"{facts.address} is free")


def _starts(facts: StartFacts | None) -> Finding:
    if facts is None:
        return Finding(
            "starts", "ok", "none are kept", "--start-cache none: every start finds and plans everything anew"
        )
    if facts.error:
        return Finding(
            "starts", "warn", f"{facts.folder} cannot be written", facts.error,
            "correct who may write, or name another with --start-cache: every start plans anew meanwhile",
        )  # fmt: skip
    return Finding("starts", "ok", f"{facts.count} kept in {facts.folder}", "taken again while nothing has changed")


def _network(facts: Facts) -> Iterator[Finding]:
    if facts.token:
        yield Finding(
            "hub", "ok", "a Hub token is set", "gated and private models can be fetched, where it gives access"
        )
    else:
        yield Finding("hub", "ok", "no Hub token is set", "only public models can be fetched; HF_TOKEN sets one")
    if facts.offline:
        yield Finding("hub", "ok", "HF_HUB_OFFLINE is set", "only models that are on this disk can be served")
    for scheme, host in sorted(facts.proxies.items()):
        yield Finding(
            "proxy",
            "ok",
            f"{scheme} goes through {host}",
            "as the proxy variables say; atlas chat and bench connect directly",
        )
    exempt = [name.strip() for name in facts.no_proxy.split(",")]
    if "http" in facts.proxies and not any(name in exempt for name in ("*", *_LOOPBACK)):
        yield Finding(
            "proxy", "warn", "clients on this machine may not reach the server", "their http_proxy does not except localhost",
            f"set no_proxy={','.join(_LOOPBACK)}",
        )  # fmt: skip
