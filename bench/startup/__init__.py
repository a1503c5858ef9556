"""How soon a model is ready: `python -m bench` and its workers, tables and plot; no arm itself, which `arms` has."""
