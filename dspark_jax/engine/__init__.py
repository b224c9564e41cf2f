"""The serving engine and its OpenAI-compatible server."""
