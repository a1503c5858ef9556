"""Recurrent layers beside attention: states in slots that requests own, and backends that advance them."""
