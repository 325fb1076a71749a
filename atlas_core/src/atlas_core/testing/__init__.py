"""For tests of Atlas and of plugins: a backend that computes on the host, small models, a pytest adapter. Never used in serving."""
