"""Take requests, schedule, run, deliver: the engine's loop, its process, and the client that the server talks to it by."""
