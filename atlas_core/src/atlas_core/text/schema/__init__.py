"""JSON schemas (draft 2020-12) rewritten, exactly, into those that a grammar compiler enforces to the letter."""
