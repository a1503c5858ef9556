"""Benchmarks of vision, diffusion and encoder models, timed from their first call on."""
