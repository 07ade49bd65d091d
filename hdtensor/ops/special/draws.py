"""Random operators composed of those that draw by element (``random``)."""

from __future__ import annotations

from typing import Any

import torch

from hdtensor.ops.registry import call, special


aten = torch.ops.aten


@special(aten.normal.Tensor_Tensor, aten.normal.Tensor_float, aten.normal.float_Tensor)
def _normal(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Draw each element with its own mean and standard deviation."""

    def run(mean: Any, std: Any, *rest: Any) -> Any:
        if func is aten.normal.Tensor_Tensor:
            like = call(aten.add.Tensor, mean, std)
        else:
            like = mean if func is aten.normal.Tensor_float else std
        noise = call(aten.randn_like.default, like, **(rest[-1] or {}))
        return call(aten.add.Tensor, call(aten.mul.Tensor, noise, std), mean)

    return lambda mean, *rest: run(mean, *(rest if len(rest) > 1 else (1.0, *rest)))


@special(aten.multinomial.default)
def _multinomial(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Let the categories race: the first of exponential arrival times falls on each as likely as its weight."""

    def run(weights: Any, num: int, *rest: Any) -> Any:
        *given, kw = rest
        replacement = given[0] if given else (kw or {}).get("replacement", False)
        if not replacement:
            return call(aten.topk.default, _race(weights, kw), num)[1]
        shape = [*weights.shape[:-1], num, weights.shape[-1]]
        rows = call(aten.expand.default, call(aten.unsqueeze.default, weights, -2), shape)
        return call(aten.argmax.default, _race(rows, kw), -1)

    return run


def _race(weights: Any, kw: Any) -> Any:
    times = call(aten.empty_like.default, weights, memory_format=torch.contiguous_format)
    call(aten.exponential_.default, times, generator=(kw or {}).get("generator"))
    return call(aten.div.Tensor, weights, times)


@special(aten.rrelu_with_noise.default, aten.rrelu_with_noise_.default)
def _rrelu(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Scale each negative element by its own slope, and keep the slopes in ``noise``."""

    in_place = func is aten.rrelu_with_noise_.default

    def run(x: Any, noise: Any, *rest: Any) -> Any:
        given = rest[:-1]
        defaults: tuple[Any, ...] = (1 / 8, 1 / 3, False, None)
        lower, upper, training, generator = (*given, *defaults[len(given) :])
        if not training:
            return finish(x, call(aten.leaky_relu.default, x, (lower + upper) / 2))
        slopes = call(aten.empty_like.default, x)
        call(aten.uniform_.default, slopes, lower, upper, generator=generator)
        kept = call(aten.masked_fill.Scalar, slopes, call(aten.gt.Scalar, x, 0), 1.0)
        call(aten.copy_.default, noise, kept)
        return finish(x, call(aten.mul.Tensor, x, noise))

    def finish(x: Any, result: Any) -> Any:
        return call(aten.copy_.default, x, result) if in_place else result

    return run
