"""Every value that an operator may choose, with where it came from. Pure: flags, environment and file text are handed in."""

from atlas_core.settings.options import OPTIONS, OTHER_VARIABLES, Option, Settings
from atlas_core.settings.reading import read_settings, with_defaults
from atlas_core.settings.sources import Level, Source

__all__ = ["OPTIONS", "OTHER_VARIABLES", "Level", "Option", "Settings", "Source", "read_settings", "with_defaults"]
