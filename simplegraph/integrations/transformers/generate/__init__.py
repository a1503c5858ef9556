"""Decoding through graphs for a model's `generate`; nothing here encodes.

generation     `graph_generation`
served         one generation: its prefill, and its steps
prompt         short prompts in graphs
decoder        decodes token by token by a captured step
token_step     the module that is captured
launch         several steps in one graph
cache          the cache of fixed addresses
known_length   lets models decode from a cache of fixed length
grouped_heads  attention of one query that copies no keys
stop_checks    the check after each token
"""
