"""What does the guard against in-place changes and parted replicas add to a step of `allreduce()` on two workers?

    mpitrain launch -n 2 benchmarks/guard_cost.py [--rounds 60] [--model mlp|transformer]

A step is zero_grad, forward, backward with torch's DDP over our process group, SGD with momentum, on a fixed batch, one
torch thread a rank. Two models take turns in blocks of a few steps, the second one in every other round first:

    plain       no guard
    guarded     as in a run: every pass between two looks at all parameters' versions and addresses, and the replicas
                compared after steps 1, 2, 3, 6, 12 and so on, of which those after the warm-up are in the figures
    again       no guard, another model: what a ratio of 1 looks like on this machine, now

One comparison by itself is timed beside them: fingerprints of all tensors and of the optimizer's state, and an exchange
of 8 bytes a tensor. The load of the machine before the run is in the row.
"""

from __future__ import annotations

import contextlib
import statistics

import torch
from measuring.common import machine, make_parser, median_ratio, table, write_row
from measuring.measurement import STEPS, Command, Measurement
from measuring.models import MODELS
from measuring.turns import take_turns
from torch import nn

from mpitrain.model.gradient.loss_pass import LossPass
from mpitrain.model.in_place import InPlaceGuard, held_alike
from mpitrain.mpi.process_group.process_group import default_group
from mpitrain.mpi.runtime import start
from mpitrain.strategies import AllReduce
from mpitrain.training.replica_guard import ReplicaGuard, state_of
from mpitrain.training.synchronous.ddp import data_parallel

MEASUREMENT = Measurement(
    contestants=("a second model without a guard",),
    depends=STEPS,
    keys=("model",),
    figures=("ratio_to_plain.guarded",),
    commands=(Command("mpitrain launch -n 2 benchmarks/guard_cost.py", minutes=3),),
)

BATCH, TOKENS, WIDTH, WARM_UP = 32, 16, 128, 2


class Transformer(nn.Module):
    """Four small layers, 50 tensors."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
        self.layers, self.head = (
            nn.TransformerEncoder(layer, 4, enable_nested_tensor=False),
            nn.Linear(WIDTH, 10),
        )

    def forward(self, x):
        return self.head(self.layers(x).mean(1))


KINDS = {"mlp": MODELS["mlp"], "transformer": (Transformer, (TOKENS, WIDTH))}


class Contestant:
    """A model under DDP, with the guard of a run or without."""

    def __init__(self, runtime, name, guarded):
        make, shape = KINDS[name]
        torch.manual_seed(0)
        self.module = make()
        self.parallel = data_parallel(LossPass(self.module))
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.01, momentum=0.9)
        self.x, self.y = torch.randn(BATCH, *shape), torch.randint(0, 10, (BATCH,))
        self.in_place = InPlaceGuard([*self.module.named_parameters()], "") if guarded else None
        self.replicas = (
            ReplicaGuard(runtime, AllReduce(), lambda: held_alike(self.module), state=self.state)
            if guarded
            else None
        )

    def state(self):
        return state_of(self.optimizer, self.module.named_parameters())

    def loss(self, model, x, y):
        with self.in_place.around() if self.in_place else contextlib.nullcontext():
            return nn.functional.cross_entropy(model(x), y)

    def step(self):
        self.optimizer.zero_grad(set_to_none=True)
        self.parallel(self.loss, self.x, self.y).backward()
        self.optimizer.step()
        if self.replicas is not None:
            self.replicas.after_step()


def measure(runtime, name, options):
    """Seconds a step by contestant, of every round; and of one comparison."""
    contestants = {key: Contestant(runtime, name, key == "guarded") for key in ("plain", "guarded", "again")}
    steps = {key: contestant.step for key, contestant in contestants.items()}
    seconds = take_turns(
        steps | {"comparison": contestants["guarded"].replicas.compare}, options.rounds,
        dict.fromkeys(steps, options.block) | {"comparison": 1},
        ready=runtime.barrier, num_warm_up=WARM_UP, alternates=True,
    )  # fmt: skip
    return seconds, contestants["plain"].module


def show(runtime, name, seconds, module, options):
    ratios = {key: median_ratio(seconds[key], seconds["plain"]) for key in ("guarded", "again")}
    lines = [("way", "median ms", "ratio to plain", "95 % interval")]
    for key, values in seconds.items():
        ratio = ratios.get(key)
        spread = (f"{ratio[0]:.4f}", f"{ratio[1]:.4f} - {ratio[2]:.4f}") if ratio else ("", "")
        lines.append((key, f"{statistics.median(values) * 1e3:.3f}", *spread))
    tensors = [parameter.numel() for parameter in module.parameters()]
    print(f"\n{name}: {sum(tensors) / 1e6:.2f} million parameters in {len(tensors)} tensors")
    print(table(lines), flush=True)
    row = {
        "model": name, "rounds": options.rounds, "block": options.block, "tensors": len(tensors),
        "median_ms": {key: statistics.median(values) * 1e3 for key, values in seconds.items()},
        "ratio_to_plain": ratios,
    }  # fmt: skip
    write_row("guard_cost", row)


def main():
    parser = make_parser(__doc__, MEASUREMENT)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--block", type=int, default=4)
    parser.add_argument("--model", choices=sorted(KINDS), default=None)
    options = parser.parse_args()
    runtime = start()
    assert runtime.size == 2, "start with 2 ranks"
    torch.set_num_threads(1)
    if runtime.rank == 0:
        print(f"{machine()['cpu']}, {machine()['num_cores']} cores, one thread a rank")
    with default_group(runtime):
        for name in [options.model] if options.model else sorted(KINDS):
            seconds, module = measure(runtime, name, options)
            if runtime.rank == 0:
                show(runtime, name, seconds, module, options)
    runtime.finish()


if __name__ == "__main__":
    main()
