"""Ask the driver which memory a captured graph touches: its nodes, their addresses, and the owners of the memory.

nodes   reads the nodes of a graph
places  takes the inventory, and finds the owner of each address
"""
