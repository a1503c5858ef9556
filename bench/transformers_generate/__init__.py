"""`generate` of transformers' families timed: plain, compiled and through graphs; nothing of the reference engine."""
