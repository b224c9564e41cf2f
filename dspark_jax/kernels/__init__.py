"""Pallas kernels; each has a slow twin in ops."""
