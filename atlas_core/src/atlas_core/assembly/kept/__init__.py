"""What a start found, resolved and planned, kept for the next one, which takes it again when nothing that it depends on has changed.

What a start depends on is said in ``marks``; ``file`` has what lies on disk, and is believed only when it is whole and this user's own.
"""
