"""Which tokens enter the next step: continuous batching over slots and pages.

Pure: no clock, device, thread or array.
"""
