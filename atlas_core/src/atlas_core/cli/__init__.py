"""Arguments in, text and exit codes out. Nothing is decided here."""
