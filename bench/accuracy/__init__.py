"""Scores trained models on small texts, eagerly and through graphs: exact match, perplexity, acceptance. No times."""
