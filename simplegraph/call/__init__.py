"""A call: signature, static inputs, padding, outputs."""
