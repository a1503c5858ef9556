"""The devices of graphs: a GPU, by torch.cuda.CUDAGraph, or the CPU, by an emulator with CUDA's rules.

protocol      `GraphDevice`: the operations that captures and replays need of a device
inventory     asks the driver which memory captured graphs touch
select        the `GraphDevice` of a torch device
cuda          the GPU. Captures and replays call CUDA only here; sleep, the audit and first uses of libraries do, too
emulator      the emulator, on CPU tensors
saved_state   saves and restores memory and random generators that a run may change
kernel_names  tells by the name of a kernel which library launches it
"""
