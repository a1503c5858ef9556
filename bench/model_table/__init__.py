"""The table of other people's models: the list of them, and what serves each."""
