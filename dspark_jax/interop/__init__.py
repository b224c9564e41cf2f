"""Checkpoints of other projects, read and written."""
