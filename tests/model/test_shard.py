"""The flat vector, its shards and their optimizers: any slicing gives the same
bits, and a version that was read stays what it was."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from mpitrain.errors import UsageError
from mpitrain.model import FixedBuffer, FlatModel, ShardStore
from mpitrain.model.optimizers.optimizer import ELEMENTWISE, check_elementwise
from mpitrain.model.optimizers.sliced_step import SlicedStep
from mpitrain.model.shards.elastic_shard import ElasticStore
from mpitrain.model.wire.buffers import BufferPool
from mpitrain.model.wire.flat import all_finite, make_layout
from mpitrain.system.looking import only_looking

SHAPES = [(17, 13), (13,), (5, 3, 3, 3), (1,), (301,)]


def make_model(dtype=torch.float32):
    torch.manual_seed(3)
    module = nn.Module()
    for index, shape in enumerate(SHAPES):
        module.register_parameter(f"p{index}", nn.Parameter(torch.randn(shape, dtype=dtype)))
    return module


def in_two_groups(cls, module, **options):
    parameters = list(module.parameters())
    return cls([{"params": parameters[3:]}, {"params": parameters[:3], "lr": 0.004}], lr=0.01, **options)


OPTIMIZERS = {
    "momentum": lambda m: in_two_groups(torch.optim.SGD, m, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda m: in_two_groups(torch.optim.SGD, m, momentum=0.9, nesterov=True),
    "foreach": lambda m: in_two_groups(torch.optim.SGD, m, momentum=0.9, foreach=True),
    "fused": lambda m: in_two_groups(torch.optim.SGD, m, momentum=0.9, fused=True),
    "tensor_rate": lambda m: torch.optim.Adam(m.parameters(), lr=torch.tensor(0.01)),
} | {name: lambda m, name=name: in_two_groups(getattr(torch.optim, name), m) for name in ELEMENTWISE}


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
@pytest.mark.parametrize("num_shards", [1, 2, 3, 7])
def test_any_slicing_gives_torchs_own_bits(name, num_shards, monkeypatch):
    """Into shards, and of a shard into slices that are stepped one after the other."""
    if num_shards in (2, 7):
        monkeypatch.setattr(SlicedStep, "slice_bytes", 100)
    reference, module = make_model(), make_model()
    optimizer, prototype = OPTIMIZERS[name](reference), OPTIMIZERS[name](module)
    flat = FlatModel(module, prototype, num_shards)
    stores = [
        ShardStore(flat.layout, shard, flat.wire_buffers[shard].body, prototype)
        for shard in range(num_shards)
    ]
    for step in range(4):
        torch.manual_seed(step)
        for theirs, ours in zip(reference.parameters(), module.parameters(), strict=True):
            theirs.grad = torch.randn_like(theirs)
            ours.grad = theirs.grad.clone()
        optimizer.step()
        wire_buffers = flat.push_buffers()
        assert flat.gather_gradients(wire_buffers)
        for shard, (store, wire_buffer) in enumerate(zip(stores, wire_buffers, strict=True)):
            store.add(0, wire_buffer, 1.0)
            store.apply()
            flat.install(shard, store.live)
        for theirs, ours in zip(reference.parameters(), module.parameters(), strict=True):
            if name == "fused":  # its kernels round a vector's tail differently from its body
                torch.testing.assert_close(theirs, ours, rtol=1e-6, atol=1e-7)
            else:
                assert torch.equal(theirs, ours), (step, theirs.shape)


@pytest.mark.parametrize("name", ["momentum", "Adam", "Adagrad"])
def test_state_restores_bit_for_bit(name, monkeypatch):
    """What was stepped in slices goes on as a whole."""
    monkeypatch.setattr(SlicedStep, "slice_bytes", 100)
    module = make_model()
    prototype = OPTIMIZERS[name](module)
    flat = FlatModel(module, prototype, 2)
    stores = [ShardStore(flat.layout, 1, flat.wire_buffers[1].body, prototype) for _ in range(2)]

    def push(store, seed):
        wire_buffer = store.wire_buffer()
        wire_buffer.body.copy_(
            torch.randn(wire_buffer.body.shape, generator=torch.Generator().manual_seed(seed))
        )
        store.add(0, wire_buffer, 1.0)
        store.apply()

    push(stores[0], 1)
    saved = copy.deepcopy(stores[0].state())
    push(stores[0], 2)
    stores[1].restore(saved)
    monkeypatch.undo()
    push(stores[1], 2)
    assert torch.equal(stores[0].live.body, stores[1].live.body)


def test_a_version_that_is_held_never_changes_and_frames_are_reused():
    module = make_model()
    prototype = OPTIMIZERS["momentum"](module)
    flat = FlatModel(module, prototype, 1)
    store = ShardStore(flat.layout, 0, flat.wire_buffers[0].body, prototype)
    held = store.read(0)
    before = held.body.clone()
    for _ in range(5):
        wire_buffer = store.wire_buffer()
        wire_buffer.body.fill_(1.0)
        store.add(0, wire_buffer, 1.0)
        store.apply()
    assert torch.equal(held.body, before) and not torch.equal(store.live.body, before)
    held.release()
    assert store.pool.num_frames == 3  # the live one, the one that was held, one gradient


def test_an_update_is_the_mean_of_the_weighted_gradients():
    module = make_model()
    prototype = torch.optim.SGD(module.parameters(), lr=1.0)
    flat = FlatModel(module, prototype, 1)
    store = ShardStore(flat.layout, 0, flat.wire_buffers[0].body, prototype)
    before = store.live.body.clone()
    for value, weight in ((2.0, 0.5), (4.0, 0.25), (8.0, 1.0), (16.0, 0.5)):
        wire_buffer = store.wire_buffer()
        wire_buffer.body.fill_(value)
        store.add(0, wire_buffer, weight)
    store.apply()
    assert torch.equal(store.live.body, before - 4.5)


@given(
    num_shards=st.integers(1, 40),
    order=st.permutations(range(len(SHAPES))),
    split=st.integers(0, len(SHAPES)),
)
def test_the_layout_covers_everything_once_in_balanced_contiguous_shards(num_shards, order, split):
    module = make_model()
    parameters = [list(module.parameters())[index] for index in order]
    groups = [{"params": part} for part in (parameters[:split], parameters[split:]) if part]
    layout = make_layout(module, torch.optim.SGD(groups, lr=0.1), num_shards)
    sizes = [layout.size(shard) for shard in range(num_shards)]
    total = sum(parameter.numel() for parameter in parameters)
    assert sum(sizes) == total and max(sizes) - min(sizes) <= 1
    seen = []
    for shard in range(num_shards):
        pieces = layout.pieces(shard)
        assert [at for *_, at in pieces] == sorted(at for *_, at in pieces)
        assert sum(stop - start for _, start, stop, _ in pieces) == sizes[shard]
        assert sum(stop - start for _, start, stop in layout.group_slices(shard)) == sizes[shard]
        seen += [(index, element) for index, start, stop, _ in pieces for element in range(start, stop)]
    assert len(seen) == len(set(seen)) == total


def test_unused_and_frozen_parameters():
    module = make_model()
    module.p1.requires_grad_(False)
    flat = FlatModel(module, torch.optim.SGD(module.parameters(), lr=0.1), 2)
    assert flat.layout.names == ("p0", "p2", "p3", "p4")
    (module.p0.sum() * 2).backward()
    wire_buffers = flat.push_buffers()
    assert flat.gather_gradients(wire_buffers)
    whole = torch.cat([wire_buffer.body for wire_buffer in wire_buffers])
    assert torch.equal(whole[:221], torch.full((221,), 2.0)) and not whole[221:].any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_nonfinite_gradients_are_seen_and_huge_finite_ones_are_not_mistaken(bad):
    vector = torch.zeros(1000)
    vector[3] = 3e38  # its square overflows
    assert all_finite([vector])
    vector[777] = bad
    assert not all_finite([vector])


def test_layerwise_optimizers_are_refused_with_the_reason():
    module = make_model()
    for optimizer in (torch.optim.LBFGS(module.parameters()), torch.optim.Adafactor(module.parameters())):
        with pytest.raises(UsageError, match="slices that cut through layers"):
            check_elementwise(optimizer)

    class Mine(torch.optim.SGD):
        elementwise = True

    check_elementwise(Mine(module.parameters(), lr=0.1))

    class Composed(torch.optim.Optimizer):
        def __init__(self, parameters):
            super().__init__(parameters, {})
            self.optimizers = {"muon": torch.optim.SGD(self.param_groups, lr=0.1)}

    with pytest.raises(UsageError, match="Composed cannot run on a parameter server"):
        check_elementwise(Composed(module.parameters()))


def test_mixed_dtypes_and_too_many_servers_are_refused():
    module = make_model()
    module.p1.data = module.p1.data.double()
    with pytest.raises(UsageError, match="p4 is float32, p1 is float64: convert them"):
        make_layout(module, torch.optim.SGD(module.parameters(), lr=0.1), 1)
    small = nn.Linear(1, 1)
    with pytest.raises(UsageError, match="3 servers for 2 parameters"):
        make_layout(small, torch.optim.SGD(small.parameters(), lr=0.1), 3)


def test_frames_carry_stamps_at_both_ends_outside_the_numbers():
    for numel in (1, 7, 16, 33):
        wire_buffer = FixedBuffer(numel, torch.float32)
        wire_buffer.body.fill_(5.0)
        stamp = wire_buffer.stamp()
        assert stamp and wire_buffer.stamps() == (stamp, stamp)
        assert torch.equal(wire_buffer.body, torch.full((numel,), 5.0))
        wire_buffer.raw[-4] ^= 1
        assert wire_buffer.stamps()[0] != wire_buffer.stamps()[1]


def test_contents_keep_the_stamp_that_they_were_sent_with_first():
    """However often they are sent; other contents have another one."""
    pool = BufferPool(4, torch.float32)
    wire_buffer = pool.take()
    first = wire_buffer.stamp()
    assert wire_buffer.hold().stamp() == first and wire_buffer.stamps() == (first, first)
    with pytest.raises(AssertionError, match="somebody else holds"):
        wire_buffer.rewrite()
    wire_buffer.release()
    wire_buffer.rewrite()
    second = wire_buffer.stamp()
    wire_buffer.release()
    assert pool.take() is wire_buffer and len({first, second, wire_buffer.stamp()}) == 3


@pytest.mark.parametrize("make", ["shard", "elastic"])
def test_an_update_changes_the_stamp_of_what_is_sent_and_of_nothing_that_was(make):
    module = make_model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    layout = make_layout(module, optimizer, 1)
    initial = torch.zeros(layout.size(0))
    store = (
        ShardStore(layout, 0, initial, optimizer)
        if make == "shard"
        else ElasticStore(layout, 0, initial, 0.5)
    )
    stamps = []
    for _ in range(3):
        held = store.read(1)
        stamps.append(held.stamp())
        gradient = store.wire_buffer()
        gradient.body.fill_(1.0)
        store.add(2, gradient, 1.0)
        store.apply()
        assert held.stamps() == (stamps[-1], stamps[-1])
        held.release()
        again = store.read(1, full=True)
        stamps.append(again.stamp())
        again.release()
        gradient = store.wire_buffer()
        gradient.body.fill_(1.0)
        store.add(2, gradient, 1.0)
        store.apply()  # in place, for nobody holds it
    assert len(set(stamps)) == len(stamps)


def test_a_state_is_a_copy_but_for_who_only_looks_at_it():
    module = make_model()
    prototype = OPTIMIZERS["Adam"](module)
    flat = FlatModel(module, prototype, 1)
    store = ShardStore(flat.layout, 0, flat.wire_buffers[0].body, prototype)
    wire_buffer = store.wire_buffer()
    wire_buffer.body.fill_(1.0)
    store.add(0, wire_buffer, 1.0)
    store.apply()
    own = [store.live.body, *(each["exp_avg"] for each in store.optimizer.state.values())]

    def places():
        state = store.state()
        kept = [state["parameters"], *(each["exp_avg"] for each in state["optimizer"]["state"].values())]
        assert all(torch.equal(one, other) for one, other in zip(kept, own, strict=True))
        return {one.data_ptr() for one in kept}

    assert places().isdisjoint(one.data_ptr() for one in own)
    with only_looking():
        assert places() == {one.data_ptr() for one in own}
