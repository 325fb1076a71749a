"""The responses face: items in, items out, and what is kept of them."""
