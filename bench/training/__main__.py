"""``python -m bench.training``: training steps of several models; see `training_steps`."""

from bench.training.training_steps import main

main()
