"""Benchmark of the latency of one call whose answer is waited for, beside graphs without guards."""
