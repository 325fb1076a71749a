"""Step programs: what a model records, and the planner that covers the record with implementations."""
