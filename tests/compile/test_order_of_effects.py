"""What ranks send and receive has one order in every rank's program, also where a compiler reorders operators."""

import torch

from hdtensor._torch_compilers import keep_in_order


_library = torch.library.Library("order_of_effects", "DEF")
_ran: list[int] = []


def _run(x, number, size):
    _ran.append(number)
    return x.new_ones(size)


_library.define("message(Tensor x, int number, int size) -> Tensor")
_library.impl("message", _run, "CompositeExplicitAutograd")
keep_in_order("order_of_effects::message", _library, lambda x, number, size: x.new_empty(size))


def _program(a, b, nothing):
    """Send twice what was computed, and use no result; then send nothing, and use what comes."""
    message = torch.ops.order_of_effects.message
    x = a * b
    message(x, 1, 0)
    message(torch.cat([x[:4], x[4:]]), 2, 0)
    message(nothing, 3, 0)
    return message(nothing, 4, 8) * 2


def test_inductor_keeps_the_order_of_calls_that_do_not_need_each_other(monkeypatch):
    monkeypatch.setattr(torch._inductor.config, "compile_threads", 1)
    torch._dynamo.reset()
    # This mode brings together what it can capture, and moves the rest to the front and to the back.
    compiled = torch.compile(_program, fullgraph=True, mode="reduce-overhead")
    result = compiled(torch.ones(8), torch.ones(8), torch.empty(0))
    assert result.tolist() == [2.0] * 8
    assert _ran == [1, 2, 3, 4]
