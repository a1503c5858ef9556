"""Makes what the pages show: tables and plots from `bench/results`, drawings, the notebook's outputs."""
