"""Holds graphs for other people's models, which stay as they are, a folder for each library; no models of our own."""
