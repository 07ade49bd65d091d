"""Tensors filled with counter-based random numbers, whole or as a box of a larger one."""

import math

import torch
from hdtensor.triton_kernels.counter_random import fill_uniform_, random_bits


def row_major(shape):
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def filled(fill, shape, dtype, *args, key=5, start=None, global_strides=None):
    out = torch.zeros(shape, dtype=dtype)
    start = (0,) * out.dim() if start is None else start
    global_strides = row_major(shape) if global_strides is None else global_strides
    assert fill(out, key, start, global_strides, *args) is out
    return out


def words(num, key, *, start=0, step=1):
    return filled(random_bits, (num,), torch.int64, key=key, start=(start,), global_strides=(step,))


def units(num, key, **box):
    return filled(fill_uniform_, (num,), torch.float64, key=key, **box)
