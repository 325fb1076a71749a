"""What stands between a plan and a device: budget, weights, bound graphs, and the doubles of backends and ranks."""
