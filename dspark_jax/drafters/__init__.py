"""Drafters behind one protocol; none knows a target family."""
