"""Benchmarks, and the models and the reference engine that they measure; nothing that simplegraph itself needs."""
