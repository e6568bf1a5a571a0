"""CUDA devices that are simulated in host memory, for tests of what the host does with a GPU.

Tensors are torch's own with the device ``cuda:0``; operators run on the CPU over the same memory, Triton's kernels
under its interpreter. Everything above the kernels runs as on a GPU: devices, streams, events, pinned memory, graphs.
What a GPU refuses is refused; races that a GPU would not report are reported:

- operators over tensors of different devices raise, as torch's do;
- memory is poisoned before it is given out and when it is given back (`memory`);
- downloads are complete once their event was waited for, the sources of uploads must stay unchanged until then, and
  every wait for the device is listed (`streams`);
- a graph replays its launches over the captured addresses; waits, permanent allocations and uploads of pageable memory
  are refused during capture; contents of the shared pool do not survive replays of other graphs (`graphs`);
- work on two streams must be ordered by events where it touches the same memory (`order`);
- programs of a kernel run in any order; those of a kernel that waits for other ranks' programs interleave (`kernels`);
- an error of a kernel is raised by every later call, until the process exits (`failures`);
- ranks are processes joined by NCCL's operations (`nccl`) and by symmetric memory (`symmetric`).

`observer` counts launches at a model's true sizes instead: nothing large is computed (`benchmarks.step_costs`).

Not simulated: speed, kernel code compiled for a GPU, real concurrency inside a kernel.
"""
