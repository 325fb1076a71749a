"""The dialects of core: how models write tool calls and thoughts. Pure; every parser reads text in pieces of any size."""
