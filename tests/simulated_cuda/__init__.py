"""CUDA devices that are simulated in host memory, for tests of the host side of a GPU.

Tensors are torch's own with the device ``cuda:0``; operators run on the CPU over the same memory, Triton's kernels
under its interpreter. Everything above the kernels runs as on a GPU: devices, streams, events, pinned memory, graphs.
Invalid operations are refused as on a GPU; races are reported, also those that a GPU does not report:

- operators over tensors of different devices raise, as torch's do;
- memory is poisoned at allocation and at release (`memory`);
- downloads are complete after a wait for their event, the sources of uploads must stay unchanged until then, and every
wait for the device is recorded (`streams`);
- a graph replays its launches over the captured addresses, whose memory must not be given back; waits, permanent
  allocations and uploads of pageable memory are refused during capture; contents of the shared pool are lost in replays
  of other graphs (`graphs`);
- memory that tensors give back is free for other users of the device after ``torch.cuda.empty_cache`` only;
- work on two streams that uses the same memory must be ordered by events (`order`);
- programs of a kernel run in any order; programs of kernels that wait for other ranks' programs interleave (`kernels`);
- an error of a kernel is raised by every later call, until the process exits (`failures`);
- ranks are processes joined by NCCL's operations (`nccl`) and by symmetric memory (`symmetric`).

`observer` counts launches at a model's true sizes instead: large launches compute nothing (`benchmarks.step_costs`).

Not simulated: speed, kernel code compiled for a GPU, real concurrency inside a kernel.
"""
