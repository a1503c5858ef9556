"""Programs that `simplegraph advise` is run on, and what following its first line then brings."""
