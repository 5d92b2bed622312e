"""What a forward pass or a loss changes in place: kept, or refused by name; and replicas that part."""

import functools

import pytest
import torch
from torch import nn

import mpitrain as mt
from mpitrain.errors import ReplicasPartedError, UsageError
from mpitrain.model.in_place import InPlaceGuard, Rarely, fingerprints, held_alike
from mpitrain.training.replica_guard import ReplicaGuard, state_of
from mpitrain.values import parse
from tests import toy


class LookedUp(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.table, self.head = nn.Embedding(17, 3, **options), nn.Linear(3, 1)

    def forward(self, x):
        return self.head(self.table((x * 8 + 8).long()).mean(1))


class Codebook(LookedUp):
    """A buffer that the next forward pass computes with, moved by each batch."""

    def __init__(self):
        super().__init__()
        self.register_buffer("codes", torch.zeros(1))

    def forward(self, x):
        self.codes.mul_(0.5).add_(x.mean())
        return super().forward(x) + self.codes


@torch.no_grad()
def clamped(model, batch):
    model.head.weight.clamp_(-0.1, 0.1)


def clamped_unseen(model, batch):
    model.head.weight.data.clamp_(-0.1, 0.1)


def given_other_memory(model, batch):
    model.head.weight.data = model.head.weight.data.clamp(-0.1, 0.1)


@torch.no_grad()
def by_the_batch(model, batch):
    model.head.weight.add_(batch["x"].mean() / 8)


WAYS = (clamped, clamped_unseen, given_other_memory, by_the_batch)


def changing(how, model, batch):
    how(model, batch)
    return toy.square_loss(model, batch)


def job_of(how=None, **changes):
    loss = toy.square_loss if how is None else functools.partial(changing, how)
    plain = functools.partial(torch.optim.SGD, lr=0.05)
    return toy.make_job(
        **{"model": LookedUp, "loss": loss, "optimizer": plain, "validate": toy.Memory()} | changes
    )


def simulate(job, text, tmp_path):
    return mt.simulate(job, parse(text, "strategy"), 3, run_dir=str(tmp_path / "run"), quiet=True)


UNDONE = ("sync()", "async(servers=2)", 'sync(optimizer="worker")', "async(push_every=2)", "decentralized()")


@pytest.mark.parametrize(
    ("text", "how"), [(UNDONE[0], how) for how in WAYS] + [(text, clamped) for text in UNDONE[1:]]
)
def test_what_others_undo_is_refused_by_name(tmp_path, text, how):
    with pytest.raises(
        UsageError, match=r"'head.weight' in place, and \w+\(\) .*: compute with a changed copy"
    ):
        simulate(job_of(how), text, tmp_path)


@pytest.mark.parametrize("text", [*UNDONE, "allreduce()", "sharded()"])
def test_rows_that_a_look_up_shortens_are_refused_by_name(tmp_path, text):
    with pytest.raises(UsageError, match="max_norm of 'table'"):
        simulate(job_of(model=lambda: LookedUp(max_norm=0.5)), text, tmp_path)


@pytest.mark.parametrize("text", ["elastic()", "localsgd(period=2)", 'decentralized(topology="ring")'])
def test_what_a_worker_keeps_is_kept(tmp_path, text):
    assert simulate(job_of(clamped), text, tmp_path)["status"] == "ok"


def threads(job, text, tmp_path):
    return mt.train(job, parse(text, "strategy"), threads=2, run_dir=str(tmp_path / "run"), quiet=True)


def test_all_ranks_may_change_weights_alike(tmp_path):
    for how in (clamped, clamped_unseen, given_other_memory):
        assert threads(job_of(how), "allreduce()", tmp_path / how.__name__)["status"] == "ok"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"how": by_the_batch}, r"step 1, 'head.weight' of rank 1 .* changes 'head.weight' in place"),
        ({"model": Codebook}, r"step 1, 'codes' of rank 1 is no longer that of rank 0"),
    ],
)
def test_replicas_that_part_end_the_run(tmp_path, capfd, changes, words):
    with pytest.raises(mt.errors.AgreedError, match=words):
        threads(job_of(**changes), "allreduce()", tmp_path)
    assert not (tmp_path / "run" / "model.safetensors").exists()


def test_statistics_are_each_replicas_own(tmp_path):
    assert threads(job_of(model=toy.normed), "allreduce()", tmp_path)["status"] == "ok"
    assert [name for name, _ in held_alike(toy.normed())] == [
        name for name, _ in toy.normed().named_parameters()
    ]
    own = nn.Module()
    own.register_buffer("running_mean", torch.zeros(1))
    own.register_buffer("codes", torch.zeros(1))
    assert [name for name, _ in held_alike(own)] == ["codes"]


def test_one_rank_alone_keeps_what_it_changes(tmp_path):
    job = job_of(by_the_batch, model=lambda: LookedUp(max_norm=0.5))
    result = mt.train(job, mt.AllReduce(), threads=1, run_dir=str(tmp_path / "run"), quiet=True)
    assert result["status"] == "ok"


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.float64,
        torch.bfloat16,
        torch.bool,
        torch.int16,
        torch.complex64,
        torch.complex128,
    ],
)
def test_a_fingerprint_is_of_every_number_and_its_place(dtype):
    whole = (torch.arange(3001) % 2).to(dtype)
    for one in (whole, whole[1:], whole[:3000].view(60, 50).t(), whole[:1], whole[5]):
        assert torch.equal(fingerprints([one]), fingerprints([one.clone()]))
    for place in (0, 1500, 3000):
        other = whole.clone()
        other[place] = not other[place]
        assert not torch.equal(fingerprints([whole]), fingerprints([other]))
    assert not torch.equal(fingerprints([whole]), fingerprints([whole.roll(1)]))
    assert fingerprints([]).numel() == 0


def test_a_fingerprint_does_not_depend_on_what_else_is_looked_at():
    """Small tensors are looked at together, up to 512 of one shape; large ones one by one."""
    sizes, generator = [0, 1, 7, 100, 2048, 2049], torch.Generator().manual_seed(1)
    many = [torch.randn(sizes[i % 6], generator=generator) for i in range(3600)]
    many += [torch.arange(7), torch.ones(7, dtype=torch.complex64).mul(1j).conj()]
    together = fingerprints(many)
    assert torch.equal(together[-32:], torch.cat([fingerprints([one]) for one in many[-32:]]))
    assert together[3::6].unique().numel() == 600


def test_looks_come_at_first_and_then_ever_more_seldom():
    looks = Rarely()
    assert [call for call in range(1, 50) if looks()] == [1, 2, 3, 6, 12, 24, 48]
    looks = Rarely(10)
    assert [call for call in range(1, 50) if looks()] == [1, 2, 3, 6, 12, 22, 32, 42]


def test_every_pass_is_looked_at_by_versions():
    weight = torch.zeros(3)
    guard = InPlaceGuard([("w", weight)], "")
    for _ in range(20):
        with guard.around():
            pass
    assert not guard.changed
    with guard.around():
        weight.add_(1)
    assert [*guard.changed] == ["w"]


def test_between_steps_a_loop_is_looked_at_as_a_pass_is():
    weight = torch.zeros(3)
    guard = InPlaceGuard([("w", weight)], "it is undone")
    guard.end_interval()  # nothing has begun
    for way in (lambda: weight.add_(1), lambda: weight.data.add_(1)):
        guard.begin_interval()
        way()
        with pytest.raises(UsageError, match="the loop, its forward pass or its loss changes 'w'"):
            guard.end_interval()


class Ranks:
    """Of which the others hold `others`, and state of their optimizers."""

    step, rank = 4, 0

    def __init__(self, *others, state=()):
        self.size, self.hosts = 1 + len(others), [f"h{rank}" for rank in range(1 + len(others))]
        self.others, self.state = others, state or [()] * len(others)

    def allgather(self, value):
        if isinstance(value[1], list):
            prints = [[0, *(fingerprints([t for _, t in some]).tolist() for some in pair), []]
                      for pair in zip(self.others, self.state, strict=True)]  # fmt: skip
            return [value] + prints
        guards = [
            ReplicaGuard(self, mt.AllReduce(), lambda held=held: held, state=lambda state=state: state)
            for held, state in zip(self.others, self.state, strict=True)
        ]
        number, of_state = self.asked
        return [value] + [guard._sketch(number, of_state) for guard in guards]


def guard_of(ranks, held, *more, **options):
    """Whose ranks know what they are asked for."""
    guard = ReplicaGuard(ranks, mt.AllReduce(), lambda: held, *more, **options)
    sketch = guard._sketch

    def noted(*asked):
        ranks.asked = asked
        return sketch(*asked)

    guard._sketch = noted
    return guard


@pytest.mark.parametrize(("off", "parts"), [(1e-9, False), (1e-3, True)])
def test_rounding_is_told_once_and_ends_nothing(off, parts):
    tensor, told = torch.ones(2000, dtype=torch.float64), []
    ranks = Ranks([("w", tensor + off)])
    guard = guard_of(ranks, [("w", tensor)], lambda *name, **fields: told.append(fields))
    if parts:
        words = (
            "after step 5, 'w' of rank 1 .*apart by 0.001.* hosts h1 and h0; they last agreed after step 2"
        )
        guard.begin_at(2)
        with pytest.raises(ReplicasPartedError, match=words):
            guard.compare()
    else:
        guard.compare()
        guard.compare()
        assert [one["tensor"] for one in told] == ["w"]


def test_of_three_the_one_that_differs_is_named():
    one = torch.ones(3)
    for odd in range(3):
        held = [[("v", one), ("w", one + (rank == odd))] for rank in range(3)]
        other = 1 if odd == 0 else 0
        with pytest.raises(
            ReplicasPartedError, match=f"'w' of rank {odd} is no longer that of rank {other} "
        ):
            guard_of(Ranks(*held[1:]), held[0]).compare()


@pytest.mark.parametrize(("at_first", "parts"), [(0.0, True), (1.0, False)])
def test_state_of_an_optimizer_is_compared_unless_it_differs_from_the_beginning(at_first, parts):
    one, momentum, others = [("w", torch.ones(3))], torch.zeros(3), torch.full((3,), at_first)
    ranks = Ranks(one, state=[[("momentum of w", others)]])
    guard = guard_of(ranks, one, state=lambda: [("momentum of w", momentum)])
    guard.compare()
    others[1] += 0.5
    if parts:
        with pytest.raises(
            ReplicasPartedError, match="'momentum of w' of rank 1 is no longer that of rank 0"
        ):
            guard.compare()
    else:
        guard.compare()


def test_a_number_that_is_not_finite_is_no_rounding():
    whole, odd = torch.full((3,), 1e-9), torch.full((3,), 1e-9)
    odd[0] = float("nan")
    with pytest.raises(ReplicasPartedError, match="apart by"):
        guard_of(Ranks([("w", odd)]), [("w", whole)]).compare()


def test_state_is_named_by_its_parameter():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    assert state_of(optimizer, model.named_parameters()) == []
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    names = [name for name, _ in state_of(optimizer, model.named_parameters())]
    assert names == ["momentum_buffer of weight", "momentum_buffer of bias"]
