"""An engine that only the pace of is real, and a server over it, each a process of its own."""
