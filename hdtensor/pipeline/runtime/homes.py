"""Where gradients go at the end of a step, and which of them travel together. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from torch.distributed.tensor import Partial

from hdtensor.pipeline.zero_specs import split_copies
from hdtensor.redistribute.resolve import resolve
from hdtensor.redistribute.steps import RedistributePlan
from hdtensor.tensor import HDTensor


class Home(NamedTuple):
    """Where a parameter's gradient goes.

    Attributes:
        parameter: The parameter.
        target: Whose ``grad`` it becomes: the parameter itself, or its master.
        of_terms: The plan where every copy has a term of the gradient.
        of_values: The plan where every copy has the gradient; None where no rank knows that of all.
        num_bytes: What a rank holds of it on average, the same number on every rank.
    """

    parameter: HDTensor
    target: HDTensor
    of_terms: RedistributePlan
    of_values: RedistributePlan | None
    num_bytes: int


def homes(
    parameters: Iterable[HDTensor], masters: Mapping[int, HDTensor] | None = None
) -> list[Home]:
    """Return where the gradients of parameters go, in the order of the parameters.

    Args:
        parameters: In registration order, the same on every rank.
        masters: By the ids of their parameters; None without ZeRO.
    """
    found = []
    for parameter in parameters:
        target = parameter if masters is None else masters.get(id(parameter), parameter)
        copies, shape = split_copies(parameter.spec), tuple(parameter.shape)
        end = copies if target is parameter else target.spec
        is_known = parameter.spec.num_subgroups == 1  # one stage of one lane has all copies
        size = target.dtype.itemsize * parameter.numel()
        found.append(
            Home(
                parameter=parameter,
                target=target,
                of_terms=resolve(copies.replace(top=Partial()), end, shape),
                of_values=resolve(copies, end, shape) if is_known else None,
                num_bytes=size * copies.num_subgroups // len(copies.ranks),
            )
        )
    return found


def rank_sets(found: Iterable[Home]) -> set[tuple[int, ...]]:
    """Return the process groups that gradients need on their way home."""
    plans = [plan for home in found for plan in (home.of_terms, home.of_values) if plan is not None]
    return {ranks for plan in plans for ranks in plan.rank_sets()}


def buckets(found: Sequence[Home], bucket_bytes: int) -> list[list[Home]]:
    """Return which gradients travel together, in the order in which they start: the same value on every rank.

    Args:
        found: In registration order.
        bucket_bytes: A bucket takes no further gradient once it is this large.
    """
    open_: defaultdict[frozenset[int], list[int]] = defaultdict(list)
    sizes: Counter[frozenset[int]] = Counter()
    closed: list[list[int]] = []
    for number in reversed(range(len(found))):
        ranks = frozenset(found[number].parameter.spec.ranks)
        open_[ranks].append(number)
        sizes[ranks] += found[number].num_bytes
        if sizes[ranks] >= bucket_bytes:
            closed.append(open_.pop(ranks))
            del sizes[ranks]
    closed += open_.values()
    closed.sort(key=lambda numbers: -numbers[-1])  # by what is ready last
    return [[found[i] for i in numbers] for numbers in closed]
