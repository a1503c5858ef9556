"""Sleep: the memory of graphs, caches and weights is given back to the driver, and taken again at its addresses."""
