"""Optimizers as users write them: plain PyTorch that knows of no cuts."""

import torch
from torch.optim import Optimizer


class HandSGD(Optimizer):
    """Momentum, written in place."""

    def __init__(self, params, lr=0.1, momentum=0.9):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "buffer" not in state:
                    state["buffer"] = torch.zeros_like(p)
                state["buffer"].mul_(group["momentum"]).add_(p.grad)
                p.add_(state["buffer"], alpha=-group["lr"])


class Lion(Optimizer):
    """The sign of an interpolation; through ``.data``, as older code does."""

    def __init__(self, params, lr=0.01, betas=(0.9, 0.99), weight_decay=0.1):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            first, second = group["betas"]
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state["average"] = torch.zeros_like(p.data)
                average = state["average"]
                p.data.mul_(1 - group["lr"] * group["weight_decay"])
                update = average * first + p.grad * (1 - first)
                p.data.add_(torch.sign(update), alpha=-group["lr"])
                average.lerp_(p.grad, 1 - second)


class Sophia(Optimizer):
    """A curvature estimate, clamped steps, an update every second step."""

    def __init__(self, params, lr=0.05, betas=(0.9, 0.95), rho=0.04):
        super().__init__(params, {"lr": lr, "betas": betas, "rho": rho})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            first, second = group["betas"]
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state["step"] = torch.tensor(0.0)
                    state["average"] = torch.zeros_like(p, memory_format=torch.preserve_format)
                    state["hessian"] = torch.zeros_like(p, memory_format=torch.preserve_format)
                if int(state["step"]) % 2 == 0:
                    state["hessian"].mul_(second).addcmul_(p.grad, p.grad, value=1 - second)
                state["step"] += 1
                state["average"].mul_(first).add_(p.grad, alpha=1 - first)
                ratio = (state["average"].abs() / (group["rho"] * state["hessian"] + 1e-8)).clamp(max=1)  # fmt: skip
                p.addcmul_(state["average"].sign(), ratio, value=-group["lr"])


class Lamb(Optimizer):
    """A trust ratio from norms of whole layers, as tensors and without reading a value."""

    def __init__(self, params, lr=0.05, betas=(0.9, 0.99), weight_decay=0.01):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            first, second = group["betas"]
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state.update(step=0, mean=torch.zeros_like(p), square=torch.zeros_like(p))
                state["step"] += 1
                state["mean"].lerp_(p.grad, 1 - first)
                state["square"].mul_(second).addcmul_(p.grad, p.grad.conj(), value=1 - second)
                mean = state["mean"] / (1 - first ** state["step"])
                square = state["square"] / (1 - second ** state["step"])
                update = mean / (square.sqrt() + 1e-6) + group["weight_decay"] * p
                size, length = p.norm(), update.norm()
                is_usual = (size > 0) & (length > 0)
                trust = torch.where(is_usual, size / length, torch.ones_like(size)).clamp(max=10)
                p.sub_(update * trust * group["lr"])


class Shampoo(Optimizer):
    """Two preconditioners for a matrix, by inverse roots from eigenvalues; momentum for the rest."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                grad, state = p.grad, self.state[p]
                if p.ndim == 2:
                    if not state:
                        state["left"] = torch.eye(p.shape[0], dtype=p.dtype)
                        state["right"] = torch.eye(p.shape[1], dtype=p.dtype)
                    state["left"] = state["left"] + grad @ grad.mT
                    state["right"] = state["right"] + grad.mT @ grad
                    grad = self.root(state["left"]) @ grad @ self.root(state["right"])
                p.add_(grad, alpha=-group["lr"])

    @staticmethod
    def root(matrix):
        values, vectors = torch.linalg.eigh(matrix)
        return (vectors * values.clamp(min=1e-8).pow(-0.25)) @ vectors.mT


class GroupAdamW(Optimizer):
    """Decay by group and by number of dims, ``foreach`` calls written out, bias correction by tensors."""

    def __init__(self, params, lr=0.02, betas=(0.9, 0.99), weight_decay=0.1):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            first, second = group["betas"]
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            for p in params:
                if p not in self.state:
                    self.state[p] = {
                        "step": torch.tensor(0.0),
                        "mean": torch.zeros_like(p),
                        "square": torch.zeros_like(p),
                    }
            states = [self.state[p] for p in params]
            grads = [p.grad for p in params]
            means, squares = [s["mean"] for s in states], [s["square"] for s in states]
            torch._foreach_add_([s["step"] for s in states], 1)
            matrices = [p for p in params if p.ndim > 1]
            if matrices:
                torch._foreach_mul_(matrices, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_lerp_(means, grads, 1 - first)
            torch._foreach_mul_(squares, second)
            torch._foreach_addcmul_(squares, grads, grads, 1 - second)
            roots = torch._foreach_sqrt(squares)
            torch._foreach_div_(roots, [(1 - second ** s["step"]).sqrt().item() for s in states])
            torch._foreach_add_(roots, 1e-6)
            rates = [-(group["lr"] / (1 - first ** s["step"])).item() for s in states]
            torch._foreach_addcdiv_(params, means, roots, rates)


class Sam(Optimizer):
    """Climbs along the whole gradient's norm, asks again there, and steps from where it was."""

    def __init__(self, params, lr=0.1, rho=0.05):
        super().__init__(params, {"lr": lr, "rho": rho})

    @torch.no_grad()
    def step(self, closure=None):
        closure = torch.enable_grad()(closure)
        loss = closure()
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = self.norm([p.grad for p in params])
        for p in params:
            self.state[p]["before"] = p.detach().clone()
            p.add_(p.grad, alpha=self.param_groups[0]["rho"] / (norm + 1e-12))
        closure()
        for p in params:
            p.copy_(self.state[p]["before"])
            p.add_(p.grad, alpha=-self.param_groups[0]["lr"])
        return loss

    @staticmethod
    def norm(grads):
        return sum(value_of(grad.square().sum()) for grad in grads) ** 0.5


def value_of(tensor):
    """A number for ``alpha``; where parts of a sum lie on several subgroups it is collective."""
    return tensor.full_tensor().item() if hasattr(tensor, "full_tensor") else tensor.item()


class Lookahead(Optimizer):
    """Wraps another optimizer; its slow weights are copies, synchronised every second step."""

    def __init__(self, inner, alpha=0.5, every=2):
        self.inner, self.alpha, self.every, self.count = inner, alpha, every, 0
        super().__init__(inner.param_groups, {})
        self.slow = [p.detach().clone() for g in self.param_groups for p in g["params"]]

    @torch.no_grad()
    def step(self, closure=None):
        self.inner.step()
        self.count += 1
        if self.count % self.every == 0:
            fast = [p for g in self.param_groups for p in g["params"]]
            for slow, p in zip(self.slow, fast, strict=True):
                slow += self.alpha * (p.detach() - slow)
                p.data.copy_(slow)


class ScheduleFree(Optimizer):
    """AdamW whose averaged and moving points are interpolated; ``z`` is a copy of the parameter."""

    def __init__(self, params, lr=0.02, beta=0.9, second=0.99):
        super().__init__(params, {"lr": lr, "beta": beta, "second": second, "k": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            weight = 1 / (group["k"] + 1)
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if "z" not in state:
                    state["z"] = torch.clone(p, memory_format=torch.preserve_format)
                    state["square"] = torch.zeros_like(p, memory_format=torch.preserve_format)
                state["square"].mul_(group["second"]).addcmul_(p.grad, p.grad, value=1 - group["second"])  # fmt: skip
                update = p.grad.div(state["square"].sqrt().add_(1e-6))
                p.lerp_(end=state["z"], weight=weight)
                p.add_(update, alpha=group["lr"] * (group["beta"] * (1 - weight) - 1))
                state["z"].sub_(update, alpha=group["lr"])
            group["k"] += 1


class Centralized(torch.optim.SGD):
    """Gradients without their mean over all dims but the first, then torch's own step."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.ndim > 1:
                    p.grad.sub_(p.grad.mean(dim=tuple(range(1, p.ndim)), keepdim=True))
        return super().step(closure)


class Normalized(Optimizer):
    """Reads each layer's norm as a number and branches on it."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                norm = torch.linalg.vector_norm(p.grad)
                if value_of(norm) > 1e-12:
                    p.sub_(p.grad / norm * group["lr"])


class Thresholds(Optimizer):
    """Keeps a third of each layer's gradient, by ``topk`` of its magnitudes."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                flat = p.grad.abs().flatten()
                threshold = flat.topk(max(1, flat.numel() // 3)).values.min()
                sparse = torch.where(p.grad.abs() >= threshold, p.grad, torch.zeros_like(p.grad))
                p.add_(sparse, alpha=-group["lr"])
