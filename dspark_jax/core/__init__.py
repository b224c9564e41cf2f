"""Array types, the device mesh, and lines for people who watch."""
