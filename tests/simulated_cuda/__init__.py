"""CUDA devices that are simulated in host memory, for tests of what the host does with a GPU.

Tensors are torch's own and say ``cuda:0``; operators run on the CPU over the same memory, Triton's kernels under its
interpreter. So everything above the kernels is what runs on a GPU: devices of tensors, streams, events, pinned memory,
graphs. What a GPU would refuse is refused, and what it would do without saying so is said:

- operators over tensors of different devices raise, as torch's do;
- memory is poisoned before it is given out and when it is given back (`memory`);
- downloads are there when their event was waited for and not before, uploads must find their source unchanged until
  then, and whatever waits for the device is listed (`streams`);
- a graph replays what was launched over the addresses it was recorded with, and may not wait, allocate for good or
  upload pageable memory while it is recorded; what other graphs left in the shared pool is lost (`graphs`);
- work on two streams must be ordered by events where it touches the same memory (`order`);
- programs of a kernel run in any order (`kernels`);
- an error of a kernel is told by every call from then on, until the process ends (`failures`);
- ranks are processes that meet by NCCL's operations (`nccl`) and write into each other's memory (`symmetric`).

It says nothing about speed, about kernels' code for a GPU, or about what depends on real concurrency inside a kernel.
"""
