"""Codecs as DDP communication hooks, over our group and over gloo: replicas, numbers, warm-up, state."""

import tempfile

import torch
import torch.distributed as dist
from torch import nn

import mpitrain as mt
from benchmarks.measuring.gloo import never_destroyed
from mpitrain.codecs import Part, write_message
from mpitrain.model.gradient.clipping import Clipping
from mpitrain.model.recipe import GradientRule
from mpitrain.model.wire.codec_registry import make_encoder, make_layout_of
from mpitrain.training.synchronous.codec_hooks import attach_codec
from mpitrain.training.synchronous.ddp import data_parallel
from tests.mpi.cases import run_cases, starts

CODECS = [
    mt.Float16(), mt.BFloat16(), mt.EightBit(), mt.Threshold(density=0.05), mt.TopK(density=0.05), mt.OneBit(),
    mt.PowerSGD(), mt.QSGD(), mt.TopK(density=0.05, momentum=0.9, clip=1.0), mt.Threshold(warmup_steps=2),
]  # fmt: skip
GROUPS = {}


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 5))


def batch(rank, step):
    generator = torch.Generator().manual_seed(100 * rank + step)
    x = torch.randn(8, 40, generator=generator)
    return x, x[:, :5].argmax(1)


def train(codec, group, rank, num_steps=6, state=None, first=0, module=None):
    module = module or net()
    parallel = data_parallel(module, group)
    hook = attach_codec(parallel, codec, group)
    if state is not None:
        hook.restore(state)
    train_on(parallel, rank, num_steps, first)
    return module, hook


def train_on(parallel, rank, num_steps=6, first=0):
    """A few steps of a module under DDP."""
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    for step in range(first, first + num_steps):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(parallel(x), y).backward()
        optimizer.step()


def flat(module):
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()])


def same_everywhere(vector, size):
    rows = [torch.empty_like(vector) for _ in range(size)]
    dist.all_gather(rows, vector, group=GROUPS["mpi4py"])
    return all(torch.equal(row, vector) for row in rows)


@starts
def case_groups(rt):
    """The default group is gloo's; ours stands beside it."""
    name = rt.broadcast(tempfile.mktemp() if rt.rank == 0 else None)
    store = dist.FileStore(name, rt.size)
    dist.init_process_group("gloo", store=store, rank=rt.rank, world_size=rt.size)
    GROUPS["gloo"] = dist.group.WORLD
    never_destroyed(GROUPS["gloo"])
    GROUPS["mpi4py"] = dist.new_group(backend="mpi4py")


def case_each_rank_clips_its_own_gradient_before_the_codec(rt):
    """And a limit that no gradient exceeds changes no bit, also where buckets then wait for each other."""
    for codec in CODECS:
        plain, _ = train(codec, GROUPS["mpi4py"], rt.rank)
        module = net()
        parallel = data_parallel(module, GROUPS["mpi4py"])
        hook = attach_codec(parallel, codec, GROUPS["mpi4py"])
        hook.own_gradients = GradientRule(clipping=Clipping(norm=1e30, value=1e30)).begin(rt.rank)
        train_on(parallel, rt.rank)
        assert torch.equal(flat(plain), flat(module)), codec

        x, y = batch(rt.rank, 0)
        own = net()
        nn.functional.cross_entropy(own(x), y).backward()
        before = nn.utils.clip_grad_norm_(own.parameters(), 0.125)
        nn.utils.clip_grad_value_(own.parameters(), 0.01)
        assert before > 0.25
        expected = sorted(p.grad.norm().item() for p in own.parameters())

        seen = []
        module = net()
        parallel = data_parallel(module, GROUPS["mpi4py"])
        hook = attach_codec(parallel, codec, GROUPS["mpi4py"])
        hook.own_gradients = GradientRule(clipping=Clipping(norm=0.125, value=0.01)).begin(rt.rank)
        exchange = hook._exchange

        def spied(parts, seen=seen, exchange=exchange):
            seen += [
                part.flat[field.start : field.start + field.numel].norm().item()
                for part in parts
                for field in part.layout
            ]
            exchange(parts)

        hook._exchange = spied
        train_on(parallel, rt.rank, num_steps=1)
        assert len(seen) == len(expected)
        for one, other in zip(sorted(seen), expected, strict=True):
            assert abs(one - other) < 1e-6, codec
        assert same_everywhere(flat(module), rt.size), codec


def case_over_gloo_the_numbers_are_the_same(rt):
    """Messages are added in rank order, so which group carries them cannot be told from the bits."""
    for codec in (mt.Threshold(density=0.05), mt.OneBit(), mt.QSGD()):
        ours, _ = train(codec, GROUPS["mpi4py"], rt.rank)
        theirs, _ = train(codec, GROUPS["gloo"], rt.rank)
        assert torch.equal(flat(ours), flat(theirs)), codec
    for codec in (mt.Float16(), mt.PowerSGD()):
        ours, _ = train(codec, GROUPS["mpi4py"], rt.rank)
        theirs, _ = train(codec, GROUPS["gloo"], rt.rank)
        assert torch.allclose(flat(ours), flat(theirs), atol=1e-3), codec


def case_replicas_are_the_same_bits_with_every_codec(rt):
    for codec in CODECS:
        module, hook = train(codec, GROUPS["mpi4py"], rt.rank)
        assert same_everywhere(flat(module), rt.size), codec
        told = hook.statistics()
        assert told["bytes"] > 0 and told["mean_bytes"] > 0 and told["codec_ms"] >= 0, (codec, told)
        assert hook.num_steps == 6
        assert ("tau" in told) == (codec.name == "threshold")
        assert ("residual_norm" in told) == (codec.name not in ("float16", "bfloat16", "qsgd"))


def case_the_mean_of_the_messages_arrives(rt):
    """What the hook leaves in the gradients is what encoding every rank's gradient by hand gives."""
    for codec in CODECS[2:6]:
        module = net()
        parallel = data_parallel(module, GROUPS["mpi4py"])
        attach_codec(parallel, codec, GROUPS["mpi4py"])
        x, y = batch(rt.rank, 0)
        nn.functional.cross_entropy(parallel(x), y).backward()
        got = {name: p.grad.clone() for name, p in module.named_parameters()}
        total = {name: torch.zeros_like(p) for name, p in module.named_parameters()}
        layout = make_layout_of((n, p.shape) for n, p in reversed(list(module.named_parameters())))
        for rank in range(rt.size):
            alone = net()
            x, y = batch(rank, 0)
            nn.functional.cross_entropy(alone(x), y).backward()
            grads = {name: p.grad for name, p in alone.named_parameters()}
            packed = torch.cat([grads[f.name].reshape(-1) for f in layout])
            message = make_encoder(codec, rt.size, rank).encode([Part(packed, layout)])
            write_message(message, [Part(packed, layout)])
            for f in layout:
                total[f.name] += packed[f.start : f.start + f.numel].view(f.shape) / rt.size
        for name, value in got.items():
            assert torch.allclose(value, total[name], atol=1e-6), (codec, name)


def case_warm_up_is_the_dense_mean(rt):
    dense = net()
    parallel = data_parallel(dense, GROUPS["mpi4py"])
    optimizer = torch.optim.SGD(dense.parameters(), lr=0.1)
    for step in range(3):
        x, y = batch(rt.rank, step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(parallel(x), y).backward()
        optimizer.step()
    warm, hook = train(mt.Threshold(warmup_steps=3), GROUPS["mpi4py"], rt.rank, 3)
    assert torch.allclose(flat(warm), flat(dense), atol=1e-6)
    assert hook.statistics()["density"] == 1.0


def case_a_restored_hook_goes_on_to_the_bit(rt):
    """Oracle 22, with DDP's buckets made anew."""
    for codec in (mt.Threshold(density=0.05), mt.TopK(density=0.05, momentum=0.9), mt.PowerSGD(), mt.QSGD()):
        through, _ = train(codec, GROUPS["mpi4py"], rt.rank, 6)
        half, hook = train(codec, GROUPS["mpi4py"], rt.rank, 3)
        again, _ = train(codec, GROUPS["mpi4py"], rt.rank, 3, hook.state(), 3, half)
        assert torch.allclose(
            flat(through), flat(again), rtol=0, atol=0 if codec.name != "powersgd" else 1e-6
        ), codec


def case_a_gradient_that_is_not_finite_reaches_all(rt):
    for codec in CODECS:
        module = net()
        parallel = data_parallel(module, GROUPS["mpi4py"])
        attach_codec(parallel, codec, GROUPS["mpi4py"])
        x, y = batch(rt.rank, 0)
        loss = nn.functional.cross_entropy(parallel(x), y)
        (loss * float("nan") if rt.rank == 0 else loss).backward()
        assert all(p.grad.isnan().any() for p in module.parameters()), codec


def case_sixteen_bit_gradients_are_refused_by_residuals(rt):
    parallel = data_parallel(net().bfloat16(), GROUPS["mpi4py"])
    try:
        attach_codec(parallel, mt.Threshold(), GROUPS["mpi4py"])
    except ValueError as error:
        assert "float32" in str(error)
    else:
        raise AssertionError("accepted")


def case_wrap_takes_a_codec(rt):
    """As a user calls it, on the default group; momentum twice is refused."""
    dist.destroy_process_group()
    module, twice = net(), mt.AllReduce(codec=mt.TopK(momentum=0.9))
    try:
        mt.wrap(module, torch.optim.SGD(module.parameters(), 0.1, momentum=0.9), twice)
    except ValueError as error:
        assert "momentum" in str(error)
    else:
        raise AssertionError("accepted")
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    parallel, optimizer = mt.wrap(module, optimizer, mt.AllReduce(codec=mt.Threshold(density=0.05)))
    before = [p.detach().clone() for p in module.parameters()]
    x, y = batch(rt.rank, 0)
    nn.functional.cross_entropy(parallel(x), y).backward()
    optimizer.step()
    weights = module[2].weight
    moved = (weights.detach() - before[2]).abs()
    assert 0 < int((moved > 0).sum()) < 0.5 * weights.numel(), "a sparse update of a coded matrix"


run_cases(globals())
