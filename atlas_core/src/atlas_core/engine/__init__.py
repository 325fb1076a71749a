"""Take requests, schedule, run, deliver: its loop, its process, and the client by which the server reaches it."""
