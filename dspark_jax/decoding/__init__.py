"""Speculative decoding: draft, schedule, verify, commit."""
