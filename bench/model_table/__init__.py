"""The table of other people's models: the list of them, what serves each, and what it measures of every one."""
