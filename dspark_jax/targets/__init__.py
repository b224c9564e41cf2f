"""Frozen target models, one file per family."""
