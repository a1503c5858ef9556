"""Speculative decoding measured, and the training of its tiny models; the rounds themselves run in `engine`."""
