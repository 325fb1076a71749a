"""Text without I/O: tokenizer, chat templates, incremental detokenising, stop strings, dialects."""
