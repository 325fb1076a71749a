"""Import what a declaration names as ``module:attr``, when it was chosen and not before."""

from importlib import import_module
from typing import Any

from atlas_core.vocab.errors import PluginError


def load(target: str, dist: str) -> Any:
    """The object behind ``module:attr`` (dots in ``attr`` walk into it), declared by the distribution ``dist``.

    Raises PluginError naming distribution and target when the text is malformed, the module does not import or lacks the
    attribute. An AtlasError raised while importing passes unchanged: it already says what, why and cure.
    """
    module_name, colon, path = target.partition(":")
    if not (colon and module_name and path):
        raise PluginError(
            f"{dist} declares {target!r}, which is not of the form module:attr",
            cure=f"report it to the makers of {dist}",
        )
    try:
        found: Any = import_module(module_name)
    except ImportError as error:
        raise PluginError(
            f"{dist} cannot load {target}",
            f"importing {module_name} failed: {error}",
            f"install what is missing, or reinstall {dist}",
        ) from error
    walked = module_name
    for name in path.split("."):
        try:
            found = getattr(found, name)
        except AttributeError as error:
            raise PluginError(
                f"{dist} cannot load {target}",
                f"{walked} has no attribute {name!r}",
                f"reinstall {dist}; if that does not help, report it to its makers",
            ) from error
        walked += f".{name}"
    return found
