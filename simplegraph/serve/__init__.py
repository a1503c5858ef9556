"""The wrapped module: eager, capture, proof, replay."""
