"""The OpenAI-shaped face: HTTP in, one internal turn, deltas of the engine out."""
