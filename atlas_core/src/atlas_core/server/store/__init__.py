"""What outlives a request: responses and conversations, kept for whoever sent them."""
