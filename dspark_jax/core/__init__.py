"""Array types, the device mesh, and the lines of other libraries."""
