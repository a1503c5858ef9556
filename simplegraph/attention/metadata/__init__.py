"""One step's metadata: what a step is, how it is read, checked, staged and advanced. Nothing here attends."""
