"""The Llama and its drafts in every form that the benchmarks run, with its batches; nothing that is timed."""
