"""The reference engine measured: under load, step by step, beside float32; the engine itself is in `engine`."""
