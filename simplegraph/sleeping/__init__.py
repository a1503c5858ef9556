"""Sleep: the memory of graphs, caches and weights goes back to the driver, and comes again at the same addresses."""
