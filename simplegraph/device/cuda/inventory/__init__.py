"""Ask the driver which memory a captured graph touches: its nodes, their addresses, and the owners of the memory."""
