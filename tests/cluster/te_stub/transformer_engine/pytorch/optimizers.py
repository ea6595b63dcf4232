"""Adam that counts its steps by group, in an entry it makes in its first step; and the sums of gradient norms."""

import torch


class FusedAdam(torch.optim.Optimizer):
    def __init__(
        self,
        params,
        lr=1e-3,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=0.0,
        *,
        bias_correction=True,
        adam_w_mode=True,
        **others,
    ):
        assert bias_correction and adam_w_mode, others
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group["step"] + 1 if "step" in group else 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter, group):
        state, grad, (beta1, beta2) = self.state[parameter], parameter.grad, group["betas"]
        for name in ("exp_avg", "exp_avg_sq"):
            if name not in state:
                state[name] = torch.zeros_like(parameter, dtype=torch.float32)
        mean = state["exp_avg"].mul_(beta1).add_(grad, alpha=1 - beta1) / (1 - beta1 ** group["step"])
        square = state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2) / (1 - beta2 ** group["step"])
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.addcdiv_(mean, square.sqrt() + group["eps"], value=-group["lr"])


class FusedSGD(torch.optim.SGD): ...


def multi_tensor_applier(operation, overflow, lists, *args):
    return operation(2048 * 32, overflow, lists, *args)


def multi_tensor_l2norm(chunk_size, overflow, lists, per_tensor=False):
    norms = [x.float().norm() for x in lists[0]]
    return (torch.stack(norms).norm() if norms else torch.zeros(())).view(1), None


def multi_tensor_scale(chunk_size, overflow, lists, scale):
    for source, target in zip(*lists, strict=True):
        target.copy_(source * scale)
