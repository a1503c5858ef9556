"""Guards: what graphs read, and the comparison that all of it is still so."""
