"""CPU tensors inside a forward on a GPU: constants served from device copies, and values that must be watched."""
