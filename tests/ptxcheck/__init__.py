"""A functional checker for the PTX of attention kernels: runs it on the CPU after the PTX ISA manual and finds faults.

A test of kernels meant for NVIDIA GPUs; not part of the installed package. README.md says how it is used and what it
models.
"""
