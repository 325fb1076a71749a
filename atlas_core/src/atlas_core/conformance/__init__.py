"""Proof of a hardware plugin: every implementation against the references of the ops, on the device itself."""
