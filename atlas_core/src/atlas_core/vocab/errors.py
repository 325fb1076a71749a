"""Every failure that Atlas explains to a person.

AtlasError                what happened, why, and what to do about it
├── UsageError            a flag, environment value or settings file is wrong
├── PluginError           a plugin is missing, broken, or in conflict with another
├── ResolveError          no candidate accepted the need; carries every reason
├── CheckpointError       a model's files are missing, cut, contradictory or not understood
├── KernelError           a kernel is missing, stale, or failed to build
├── BudgetError           the plan does not fit into memory
├── DeviceError           the device or its driver failed; sticky errors fault the engine
├── EngineError           the engine process is loading, faulted, or gone
└── RequestError          one request is wrong or cannot be served now; never hurts another
"""


class AtlasError(Exception):
    """What happened, why, and the cure: three sentences, each of which may be shown alone."""

    def __init__(self, what: str, why: str = "", cure: str = "") -> None:
        super().__init__(what, why, cure)
        self.what = what
        self.why = why
        self.cure = cure

    def __str__(self) -> str:
        text = self.what
        if self.why:
            text += f"\n  why:  {self.why}"
        if self.cure:
            text += f"\n  cure: {self.cure}"
        return text


class UsageError(AtlasError):
    """A flag, environment value or settings file is wrong."""


class PluginError(AtlasError):
    """A plugin is missing, broken, or in conflict with another; names the distribution and entry point."""


class ResolveError(AtlasError):
    """No candidate accepted the need; ``why`` lists every candidate with its reasons."""


class CheckpointError(AtlasError):
    """A model's files are missing, cut, contradictory or not understood; names the file, key or tensor."""


class KernelError(AtlasError):
    """A kernel is missing, stale, or failed to build; names op, target and the building command."""


class ResidencyError(KernelError):
    """Blocks of a launch that wait for each other cannot all run at once on this device; another kernel may do."""


class BudgetError(AtlasError):
    """The plan does not fit into memory; says which term to lower."""


class DeviceError(AtlasError):
    """The device or its driver failed. A sticky error leaves the context unusable and faults the engine."""

    def __init__(self, what: str, why: str = "", cure: str = "", *, sticky: bool = False) -> None:
        super().__init__(what, why, cure)
        self.sticky = sticky


class EngineError(AtlasError):
    """The engine cannot answer: ``state`` is loading, faulted, draining or gone."""

    def __init__(self, what: str, why: str = "", cure: str = "", *, state: str = "faulted") -> None:
        super().__init__(what, why, cure)
        self.state = state


class RequestError(AtlasError):
    """One request is wrong or cannot be served now.

    ``kind`` is one of invalid, unauthorized, forbidden, not_found, not_allowed, too_large, headers_too_large, too_slow, overloaded, unsupported,
    not_implemented; each face maps it to a status. ``field`` is the JSON path of the offending field, ``code`` a stable machine-readable word,
    ``retry_after`` seconds (for overloaded).
    """

    def __init__(
        self, what: str, why: str = "", cure: str = "", *,
        kind: str = "invalid", field: str | None = None, code: str | None = None, retry_after: float | None = None,
    ) -> None:  # fmt: skip
        super().__init__(what, why, cure)
        self.kind = kind
        self.field = field
        self.code = code
        self.retry_after = retry_after
