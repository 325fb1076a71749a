"""Readers of checkpoints and the store that binds a model's weights to them."""
