"""Array types and the device mesh."""
