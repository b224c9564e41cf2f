"""Mathematics with parameters: layers, the one transformer block, its cache."""
