"""Where graphs live: a GPU by torch.cuda.CUDAGraph, or a CPU by an emulator of CUDA's rules.

protocol    what capture and replay need of a device
inventory   asks a driver what captured graphs touch
select      the device for a torch device
cuda        on a GPU; CUDA is called here, and for memory that sleeps in `sleeping`
emulator    on CPU tensors
memory      memory and random generators that a run may change, saved and put back
kernels     who launches a kernel, by its name in the driver
"""
