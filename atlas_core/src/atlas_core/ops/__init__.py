"""Op contracts: what each op means (a numpy reference), how close an implementation must come, and cases to try."""
