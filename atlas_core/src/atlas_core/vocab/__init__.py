"""Frozen values that every layer speaks; standard library only."""
