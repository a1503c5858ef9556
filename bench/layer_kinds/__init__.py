"""The engine's steps with models of several kinds of layers: sliding windows, and Mamba2 beside attention."""
