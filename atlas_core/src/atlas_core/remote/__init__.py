"""A client of OpenAI-compatible servers, on the standard library alone. Connects directly: proxy variables are not used."""
