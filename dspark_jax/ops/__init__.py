"""Mathematics without parameters."""
