"""What shape will run: capture sizes, padding and dispatch. Pure Python, imports no torch."""
