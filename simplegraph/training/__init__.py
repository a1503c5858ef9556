"""Training in graphs: whole steps, with gradients and optimizers, on the manager and runner that serve modules."""
