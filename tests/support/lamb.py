"""Optimizers that paramp does not know, of both kinds."""

import torch


class Lamb(torch.optim.Optimizer):
    """Adam's update, scaled to the norm of each matrix: it needs whole ones. The step count is a Python number."""

    def __init__(self, parameters, lr=1e-3, betas=(0.9, 0.99), eps=1e-6):
        super().__init__(parameters, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.step_one(parameter, group, self.state[parameter])

    def step_one(self, parameter, group, state):
        if not state:
            state.update(step=0, first=torch.zeros_like(parameter), second=torch.zeros_like(parameter))
        state["step"] += 1
        one, two = group["betas"]
        state["first"].lerp_(parameter.grad, 1 - one)
        state["second"].lerp_(parameter.grad**2, 1 - two)
        first, second = (state[name] / (1 - beta ** state["step"]) for name, beta in (("first", one), ("second", two)))
        update = first / (second.sqrt() + group["eps"])
        ratio = self.ratio(parameter, update)
        parameter.sub_(group["lr"] * ratio * update)

    def ratio(self, parameter, update):
        return parameter.norm() / update.norm()


class Slow(Lamb):
    """Its updates are small beside the weights."""

    def ratio(self, parameter, update):
        return 1e-5 * super().ratio(parameter, update)


class Elementwise(Lamb):
    """The same without the norms."""

    def ratio(self, parameter, update):
        return 1.0


class OfElements(Elementwise):
    """It takes no tensors without elements, as kernels of some libraries do."""

    def ratio(self, parameter, update):
        assert parameter.numel() == parameter.grad.numel() > 0
        return 1.0


class OfMatricesOnly(Lamb):
    """It scales matrices only, as many do; the flat slices of ZeRO are none."""

    def ratio(self, parameter, update):
        return 1.0 if parameter.ndim < 2 else 0.1


class ClipsItself(Elementwise):
    """It clips by the norm of all of its gradients, so that no rank could step alone."""

    def step(self, closure=None):
        parameters = [one for group in self.param_groups for one in group["params"] if one.grad is not None]
        torch.nn.utils.clip_grad_norm_(parameters, 1e-3)
        super().step()


class Random(Elementwise):
    """It adds noise."""

    def ratio(self, parameter, update):
        return 1 + 0.1 * torch.randn_like(parameter)


class Named(Lamb):
    """Its constructor needs names, its steps too: no other matrix can be stepped in a trial."""

    def __init__(self, model, *, names):
        super().__init__([dict(model.named_parameters())[name] for name in names])
        self.count = len(names)

    def step(self, closure=None):
        if self.count != sum(len(group["params"]) for group in self.param_groups):
            raise RuntimeError("other parameters")
        super().step()


class ScheduleFree(torch.optim.Optimizer):
    """It steps a copy of the weights; ``eval()`` gives them its average (Defazio et al., 2024)."""

    def __init__(self, parameters, lr=0.1, beta=0.5):
        super().__init__(parameters, {"lr": lr, "beta": beta, "count": 0, "train_mode": False})

    def train(self):
        self.switch(True, lambda beta: 1 - beta)

    def eval(self):
        self.switch(False, lambda beta: 1 - 1 / beta)

    @torch.no_grad()
    def switch(self, train, way):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if "stepped" in state and group["train_mode"] != train:
                    parameter.lerp_(state["stepped"], way(group["beta"]))
            group["train_mode"] = train

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            assert group["train_mode"], "step() after eval()"
            group["count"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    stepped = self.state[parameter].setdefault("stepped", parameter.clone())
                    update = group["lr"] * self.update(parameter.grad)
                    parameter.lerp_(stepped, 1 / group["count"])
                    parameter.add_(update, alpha=group["beta"] * (1 - 1 / group["count"]) - 1)
                    stepped.sub_(update)

    def update(self, gradient):
        return gradient


class ScheduleFreeOfMatrices(ScheduleFree):
    """It needs whole matrices."""

    def update(self, gradient):
        return gradient / gradient.norm()


def lamb(model):
    """Over all parameters: replicated and 1-dim ones too. The norm of a stack is that of all its experts."""
    return [Lamb(model.parameters(), lr=0.01)]


def adafactor(model):
    return [torch.optim.Adafactor(model.parameters(), lr=0.01)]
