"""For tests only: an NVIDIA GPU on which one token is fatal."""
