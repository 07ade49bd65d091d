"""Triton kernels of hdtensor, one folder each: ``reference.py`` (the definition in plain torch) beside ``kernel.py``.

This folder lies at the top of the repository and installs as ``hdtensor.triton_kernels``: a top-level
package of this name would shadow the ``triton_kernels`` library that Triton itself ships.

The kernels know nothing of ``hdtensor``: they take plain tensors and numbers, and import one another
only relatively.
"""
