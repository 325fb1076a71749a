"""Finding plugins, asking their hooks once, and looking up what they declared.

``discover`` gives the Registry that assembly works with; ``survey`` gives every record, broken ones too, and never raises for a
plugin's fault. Nothing here reads the environment: an allow-list and a trace sink are handed in.
"""

from atlas_core.plugins.discovery import discover, installed, survey
from atlas_core.plugins.load import load
from atlas_core.plugins.registry import GROUPS, PluginRecord, Registry, Table, canonical

__all__ = ["GROUPS", "PluginRecord", "Registry", "Table", "canonical", "discover", "installed", "load", "survey"]
