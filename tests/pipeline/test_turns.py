"""Functions that take turns with their caller, in threads that are used again."""

import threading

import pytest
import torch

from hdtensor.pipeline.runtime.turns import Turns


def test_functions_take_turns_and_share_a_thread_one_after_another():
    seen = []

    def call(name, fails=False):
        seen.append((name, threading.get_ident(), torch.is_grad_enabled()))
        turns[name].pause()
        if fails:
            raise ValueError(name)
        seen.append((name, threading.get_ident(), torch.is_grad_enabled()))

    turns = {
        "a": Turns(lambda: call("a")),
        "b": Turns(lambda: call("b")),
        "c": Turns(lambda: call("c", fails=True)),
    }
    with torch.no_grad():
        turns["a"].resume()
    turns["b"].resume()
    turns["a"].resume()
    turns["c"].resume()  # a has ended
    with pytest.raises(ValueError, match="c"):
        turns["c"].resume()
    names, threads, grads = zip(*seen, strict=True)
    assert names == ("a", "b", "a", "c")
    assert threads[0] == threads[2] == threads[3] != threads[1]
    assert threading.get_ident() not in threads
    assert grads == (False, True, False, True)
