"""Operators of random programs: each runs alike on plain tensors and on ``HDTensor``s.

An entry is ``name -> (pick, run, weight)``. ``pick(draw)`` chooses operands and plain arguments with the help of a
``Draw`` (see ``programs.py``); ``run(*tensors, **params)`` returns a tensor or a tuple of them. The files beside this
one fill the table.
"""

OPS = {}


def op(pick, weight=1):
    """Register a function under its name, chosen by ``pick``."""

    def register(run):
        OPS[run.__name__] = (pick, run, weight)
        return run

    return register


def over_dim(draw):
    """One tensor and one of its dims."""
    (x,) = draw.floats(min_dims=1, nonempty=True)
    return (x,), {"dim": draw.dim(x)}
