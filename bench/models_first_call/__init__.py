"""Vision, diffusion and encoder models timed from their first call on; no language model that generates."""
