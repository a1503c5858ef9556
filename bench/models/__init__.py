"""The Llama and its drafts in every form that the benchmarks run, and their batches. Contains no measurements."""
