"""CUDA graphs for models of other libraries, one folder per library; the models' code is unchanged."""
