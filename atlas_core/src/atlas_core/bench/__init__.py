"""Load for any OpenAI-compatible server: what to ask and when, asking it, and what the answers add up to."""
