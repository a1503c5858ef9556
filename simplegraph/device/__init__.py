"""Where graphs live: one protocol, on a GPU by torch.cuda.CUDAGraph, on a CPU by an emulator of CUDA's rules."""
