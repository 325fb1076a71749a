"""The composition root: the only place where names become objects."""
