"""Measures a model's units on the device at hand: each as one rank has it under tensor parallelism."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hdtensor.errors import PlannerError
from hdtensor.planner.model import ModelShape
from hdtensor.planner.profiles import ProfiledUnit, UnitTime


#: Seconds of a run that is repeated only once.
_LONG = 0.5
#: Rows of the product by which a device's rate is told.
_EDGE = 256


class UnitPoint(NamedTuple):
    """One thing to measure: the arguments of ``UnitTime``."""

    unit: ProfiledUnit
    tp: int
    mbs: int
    context: int

    @property
    def tokens(self) -> int:
        """Tokens of the micro-batch."""
        return self.mbs * self.context


class Stopwatch:
    """Seconds on a device, until all that was launched is done."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._device = device

    def now(self) -> float:
        """Return the time, in seconds from some start."""
        if self._is_cuda:
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


class Attention(nn.Module):
    """Norm, causal attention and residual, with the heads that one of ``tp`` ranks has."""

    def __init__(self, model: ModelShape, tp: int) -> None:
        super().__init__()
        self.num_heads = model.num_heads // tp
        self.num_kv_heads = max(model.num_kv_heads // tp, 1)
        self.head_dim, self.value_dim = model.head_dim, model.value_dim or model.head_dim
        self.norm = nn.RMSNorm(model.hidden)
        self.rope_dim = model.rope_dim if model.kv_rank else 0
        queries = self.num_heads * self.head_dim
        own = self.head_dim - self.rope_dim + self.value_dim
        self.q_down = nn.Linear(model.hidden, model.q_rank, bias=False) if model.q_rank else None
        self.q = nn.Linear(model.q_rank or model.hidden, queries, bias=False)
        # A latent vector of keys and values is whole on every rank; what expands it is cut by heads.
        latent = [model.kv_rank, self.rope_dim] if model.kv_rank else None
        self.latent = latent
        self.kv_down = nn.Linear(model.hidden, sum(latent), bias=False) if latent else None
        self.kv = nn.Linear(model.kv_rank or model.hidden, self.num_kv_heads * own, bias=False)
        self.output = nn.Linear(self.num_heads * self.value_dim, model.hidden, bias=False)

    def forward(self, x_BSH: Tensor) -> Tensor:
        """Return hidden states of the same shape; rank-local terms are not summed."""
        batch, length, _ = x_BSH.shape
        normed = self.norm(x_BSH)
        q = self.q(normed if self.q_down is None else self.q_down(normed))
        q = q.view(batch, length, self.num_heads, self.head_dim).transpose(1, 2)
        k, v = self._keys_and_values(normed)
        is_grouped = self.num_kv_heads != self.num_heads
        y = F.scaled_dot_product_attention(
            _rotated(q), _rotated(k), v, is_causal=True, enable_gqa=is_grouped
        )
        out: Tensor = self.output(y.transpose(1, 2).reshape(batch, length, -1))
        return x_BSH + out

    def _keys_and_values(self, x_BSH: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of the rank's heads, (batch, heads, length, width)."""
        batch, length, _ = x_BSH.shape
        shared = None
        if self.kv_down is not None and self.latent is not None:
            x_BSH, shared = self.kv_down(x_BSH).split(self.latent, dim=-1)
        kv = self.kv(x_BSH).view(batch, length, self.num_kv_heads, -1).transpose(1, 2)
        k, v = kv.split([self.head_dim - self.rope_dim, self.value_dim], dim=-1)
        if shared is not None:
            k = torch.cat([k, shared.unsqueeze(1).expand(-1, self.num_kv_heads, -1, -1)], -1)
        return k, v


class Mlp(nn.Module):
    """Norm, MLP (or experts, with tokens dealt evenly) and residual, of one of ``tp`` ranks."""

    def __init__(self, model: ModelShape, tp: int) -> None:
        super().__init__()
        self.is_gated = model.num_matrices == 3
        self.norm = nn.RMSNorm(model.hidden)
        width = model.ffn // tp

        def expert() -> nn.ModuleList:
            inner = [nn.Linear(model.hidden, width, bias=False) for _ in range(1 + self.is_gated)]
            return nn.ModuleList([*inner, nn.Linear(width, model.hidden, bias=False)])

        self.shared = nn.ModuleList(
            expert() for _ in range(model.num_shared_experts if model.num_experts else 1)
        )
        self.experts = nn.ModuleList(expert() for _ in range(model.num_experts))
        self.per_token = model.experts_per_token
        has_gate = model.num_experts > 0
        self.gate = nn.Linear(model.hidden, model.num_experts, bias=False) if has_gate else None

    def forward(self, x_BSH: Tensor) -> Tensor:
        """Return hidden states of the same shape; rank-local terms are not summed."""
        normed = self.norm(x_BSH)
        out: Tensor = x_BSH
        for expert in self.shared:
            out = out + self._run(expert, normed)
        if self.gate is None:
            return out
        tokens = normed.flatten(0, 1)
        weights = self.gate(tokens).softmax(-1)
        copies = tokens.repeat_interleave(self.per_token, 0)
        parts = copies.tensor_split(len(self.experts))
        found = [self._run(e, part) for e, part in zip(self.experts, parts, strict=True)]
        summed = torch.cat(found).view(tokens.shape[0], self.per_token, -1).sum(1)
        routed: Tensor = (summed * weights.amax(-1, keepdim=True)).view_as(out)
        return out + routed

    def _run(self, expert: nn.Module, x: Tensor) -> Tensor:
        assert isinstance(expert, nn.ModuleList), expert
        inner = F.silu(expert[0](x)) * expert[1](x) if self.is_gated else F.gelu(expert[0](x))
        output: Tensor = expert[-1](inner)
        return output


class Head(nn.Module):
    """Last norm, the rows of the head that one of ``tp`` ranks has, and the loss over them."""

    def __init__(self, model: ModelShape, tp: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(model.hidden)
        self.rows = nn.Linear(model.hidden, max(model.vocab // tp, 1), bias=False)

    def forward(self, x_BSH: Tensor) -> Tensor:
        """Return the loss, a number."""
        logits = self.rows(self.norm(x_BSH)).flatten(0, 1)
        labels = torch.zeros(logits.shape[0], dtype=torch.long, device=logits.device)
        return F.cross_entropy(logits.float(), labels)


def make_unit(unit: ProfiledUnit, model: ModelShape, tp: int) -> nn.Module:
    """Return a unit as one of ``tp`` ranks has it."""
    match unit:
        case "attention":
            return Attention(model, tp)
        case "mlp":
            return Mlp(model, tp)
        case "layer":
            return nn.Sequential(Attention(model, tp), Mlp(model, tp))
        case "embedding":
            return nn.Embedding(max(model.vocab // tp, 1), model.hidden)
        case "head":
            return Head(model, tp)


def measure_unit(
    model: ModelShape,
    point: UnitPoint,
    *,
    device: torch.device,
    dtype: torch.dtype,
    num_repeats: int = 3,
) -> UnitTime:
    """Return the median seconds of a unit's forward, backward and AdamW update, after one run to warm up.

    What takes longer than half a second is repeated once: its noise is small beside it.

    Args:
        model: Sizes.
        point: What to measure.
        device: Where.
        dtype: Of parameters and hidden states.
        num_repeats: Runs that count.

    Raises:
        PlannerError: If the device's memory does not hold it.
    """
    forward, backward, update = [], [], []
    watch = Stopwatch(device)
    try:
        with torch.device("meta"):
            module = make_unit(point.unit, model, point.tp).to(dtype)
        _check_memory(module, device)
        module.to_empty(device=device)
        for parameter in module.parameters():
            nn.init.constant_(
                parameter, 1 / model.hidden
            )  # drawing millions of numbers takes seconds
        with torch.device(device):
            x = _inputs(model, point, dtype)
        optimizer = torch.optim.AdamW(module.parameters())
        for turn in range(1 + num_repeats):
            x.grad = None
            start = watch.now()
            y = module(x)
            middle = watch.now()
            gradient = torch.ones_like(y)
            begun = watch.now()
            y.backward(gradient)
            end = watch.now()
            optimizer.step()
            done = watch.now()
            optimizer.zero_grad()
            if turn:
                forward.append(middle - start)
                backward.append(end - begun)
                update.append(done - end)
                if done - start > _LONG:
                    break
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise PlannerError(
            f"memory: {point.unit} with tp {point.tp} and {point.mbs} x {point.context} tokens does not fit on "
            f"{device}: {str(error)[:100]}. Measure smaller lengths or batch sizes."
        ) from None
    return UnitTime(
        *point,
        forward=statistics.median(forward),
        backward=statistics.median(backward),
        update=statistics.median(update),
    )


def unit_points(
    model: ModelShape,
    *,
    tps: Sequence[int],
    batch_sizes: Sequence[int],
    contexts: Sequence[int],
    units: Sequence[ProfiledUnit] = ("attention", "mlp", "embedding", "head"),
) -> list[UnitPoint]:
    """Return what to measure, small things first, so that a profile cut short covers all units.

    Args:
        model: Sizes; degrees that do not divide its heads and MLP are left out.
        tps: Degrees of tensor parallelism.
        batch_sizes: Samples of a micro-batch.
        contexts: Tokens of a sample.
        units: Which units.

    Raises:
        PlannerError: If no degree fits.
    """
    fitting = [tp for tp in tps if model.is_cut_evenly(tp)]
    if not fitting:
        raise PlannerError(
            f"tp: none of {', '.join(map(str, tps))} divides the {model.num_heads} heads and the MLP of "
            f"{model.name}; give degrees that do."
        )
    points = [
        UnitPoint(unit, tp, mbs, context)
        for tp in fitting
        for mbs in batch_sizes
        for context in contexts
        for unit in units
    ]
    return sorted(points, key=lambda point: point.tokens)


def work_of(model: ModelShape, point: UnitPoint) -> float:
    """Return the operations of a point's forward, roughly, to foresee how long it takes."""
    tokens, hidden = point.tokens, model.hidden
    match point.unit:
        case "attention":
            seen = point.context * model.num_heads * model.head_dim
            return 2 * tokens * (model.attention_parameters + seen) / point.tp
        case "mlp":
            active = (model.experts_per_token or 1) + model.num_shared_experts
            return 2 * tokens * model.num_matrices * hidden * model.ffn * active / point.tp
        case "layer":
            parts = (work_of(model, point._replace(unit=unit)) for unit in ("attention", "mlp"))
            return sum(parts)
        case "embedding":
            return float(tokens * hidden)
        case "head":
            return 2 * tokens * hidden * model.vocab / point.tp


def _check_memory(module: nn.Module, device: torch.device) -> None:
    """Raise if a unit's parameters, gradients and optimizer states are more than a machine has free: it would be killed."""
    need = 4 * sum(p.numel() * p.itemsize for p in module.parameters())
    if device.type == "cpu":
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if need > free:
            raise MemoryError(
                f"{need / 1e9:.3g} GB of parameters and states, {free / 1e9:.3g} free"
            )


def operations_per_second(device: torch.device, dtype: torch.dtype) -> float:
    """Return about how many operations a device does in a second, by one small product of matrices."""
    a = torch.zeros(_EDGE, _EDGE, device=device, dtype=dtype)
    watch = Stopwatch(device)
    seconds = []
    for _ in range(3):
        start = watch.now()
        a @ a
        seconds.append(watch.now() - start)
    return 2.0 * _EDGE**3 / max(min(seconds), 1e-9)


def _inputs(model: ModelShape, point: UnitPoint, dtype: torch.dtype) -> Tensor:
    if point.unit == "embedding":
        return torch.zeros(point.mbs, point.context, dtype=torch.long)
    x = torch.randn(point.mbs, point.context, model.hidden, dtype=dtype)
    return x.requires_grad_()


def _rotated(x_BHSD: Tensor) -> Tensor:
    """Return vectors turned by their positions (rotary embedding)."""
    half = x_BHSD.shape[-1] // 2
    length = x_BHSD.shape[-2]
    position = torch.arange(length, device=x_BHSD.device, dtype=torch.float32)
    rate = 10_000 ** -(torch.arange(half, device=x_BHSD.device, dtype=torch.float32) / max(half, 1))
    angle = torch.outer(position, rate)
    cos, sin = angle.cos().to(x_BHSD.dtype), angle.sin().to(x_BHSD.dtype)
    one, other = x_BHSD[..., :half], x_BHSD[..., half : 2 * half]
    rest = x_BHSD[..., 2 * half :]
    return torch.cat([one * cos - other * sin, other * cos + one * sin, rest], -1)


#: What measures a point; tests put another one in its place.
Measure = Callable[[UnitPoint], UnitTime]
