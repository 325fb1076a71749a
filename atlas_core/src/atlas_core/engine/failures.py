"""AtlasErrors as values that cross to another process, and back."""

from atlas_core.vocab import errors
from atlas_core.vocab.errors import AtlasError, DeviceError, EngineError, RequestError
from atlas_core.vocab.messages import Failure

STICKY = "sticky"


def to_failure(error: Exception) -> Failure:
    """The error as a value.

    ``kind`` holds a RequestError's kind, an EngineError's state, or ``sticky`` of a DeviceError.

    An exception that is no AtlasError is a defect of Atlas; it becomes an EngineError that says so.
    """
    if not isinstance(error, AtlasError):
        why = f"{type(error).__name__}: {error}"
        return Failure("EngineError", "the engine failed unexpectedly", why, "report it, with the log", "faulted")
    name, parts = type(error).__name__, (error.what, error.why, error.cure)
    if isinstance(error, RequestError):
        return Failure(name, *parts, error.kind, error.field, error.code, error.retry_after)
    if isinstance(error, EngineError):
        return Failure(name, *parts, error.state)
    if isinstance(error, DeviceError):
        return Failure(name, *parts, STICKY if error.sticky else "")
    return Failure(name, *parts)


def from_failure(failure: Failure) -> AtlasError:
    """The error again; a class that vocab does not have (a plugin's own) comes back as its base, AtlasError."""
    parts = failure.what, failure.why, failure.cure
    if failure.type == "RequestError":
        return RequestError(
            *parts, kind=failure.kind, field=failure.field, code=failure.code, retry_after=failure.retry_after
        )
    if failure.type == "EngineError":
        return EngineError(*parts, state=failure.kind)
    if failure.type == "DeviceError":
        return DeviceError(*parts, sticky=failure.kind == STICKY)
    known = getattr(errors, failure.type, AtlasError)
    return known(*parts) if isinstance(known, type) and issubclass(known, AtlasError) else AtlasError(*parts)
