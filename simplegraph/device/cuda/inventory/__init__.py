"""Read what a captured graph touches from the driver: nodes, their addresses, and whose memory these are in."""
