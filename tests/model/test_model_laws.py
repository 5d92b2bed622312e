"""Small laws of models and optimizers: what is measured, scaled, found and given back, each on numbers by hand."""

import math
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import mpitrain as mt
from mpitrain.codecs import Part
from mpitrain.embedding.sections import Section, What, join
from mpitrain.errors import UsageError, WireError
from mpitrain.model import flat_model
from mpitrain.model.building import compiling
from mpitrain.model.building.activation_checkpointing import _recomputing, checkpoint_activations
from mpitrain.model.gradient.user_code import _check_metrics, unused_parameters
from mpitrain.model.optimizers.optimizer import (
    Rates,
    attached_schedulers,
    coupled_decays,
    scaled,
    state_bytes,
)
from mpitrain.model.optimizers.torch_scheduler import TorchSchedule
from mpitrain.model.replicas.peer_replica import PeerReplica
from mpitrain.model.shards.reshard import reshard
from mpitrain.model.wire.buffers import VariableBuffer
from mpitrain.model.wire.codec_registry import make_encoder
from mpitrain.model.wire.flat import Layout, all_finite
from mpitrain.model.wire.push_codec import PushDecoder, fields_of
from mpitrain.strategies.ticks import Law, Ticks
from mpitrain.training.measure import build
from tests import toy
from tests.model.test_tabled_shard import made


@pytest.mark.parametrize("how, backend", [(True, "inductor"), ("eager", "eager"), (False, None), ("", None)])
def test_a_model_is_compiled_by_the_backend_that_is_named(monkeypatch, how, backend):
    named = []
    monkeypatch.setattr(torch, "compile", lambda call, backend: named.append(backend) or call)
    module = nn.Linear(2, 1)
    compiling.compile_in_place(module, how)
    assert named == ([] if backend is None else [backend])
    assert module(torch.ones(3, 2)).shape == (3, 1)


def test_a_message_that_was_added_up_is_given_back_and_counted():
    strategy = mt.Async(push_wire=mt.TopK(density=1.0, dense_below=0))
    module, optimizer = build(toy.make_job(), None, torch.device("cpu"))
    layout = flat_model(module, optimizer, strategy).layout
    decoder, encoder = PushDecoder(layout, 0), make_encoder(mt.TopK(density=1.0, dense_below=0))
    numbers = torch.arange(1.0, layout.size(0) + 1)
    total = torch.zeros_like(numbers)
    for number in (1, 2):
        payload = VariableBuffer(encoder.encode([Part(numbers.clone(), fields_of(layout, 0))]))
        decoder.add(payload, total)
        assert payload.wire_buffer.users == 0 and torch.equal(total, number * numbers)
        assert decoder.num_messages == number
    assert decoder.statistics()["decode_ms"] == pytest.approx(1e3 * decoder.codec_s / 2)


def test_layers_that_recompute_are_kept_from_the_compiler_where_it_cannot_put_their_buffers_back():
    for compiled in (False, True, "in part"):
        module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        if compiled == "in part":
            module[0]._compiled_call_impl = module[0]._call_impl
        checkpoint_activations(module, True, compiled is True)
        assert type(module[0]) is _recomputing(nn.Linear, False, False)
        assert type(module[1]) is _recomputing(nn.BatchNorm1d, True, bool(compiled))


# ---- gradients and optimizers


def test_what_is_finite_is_so_however_many_tensors_and_however_large():
    big, bad = (
        torch.full((3,), 1e30),
        [torch.tensor([0.0, value]) for value in (math.nan, math.inf, -math.inf)],
    )
    assert (
        all_finite([]) and all_finite([torch.zeros(0)]) and all_finite([torch.ones(2), big])
    )  # its square is not
    for one in bad:
        assert not all_finite([one]) and not all_finite([torch.ones(2), one, big])


def test_the_state_of_an_optimizer_is_measured_without_a_trace():
    module = nn.Linear(3, 2)
    before = [one.detach().clone() for one in module.parameters()]
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0, momentum=0.9, weight_decay=0.5)
    assert state_bytes(list(module.parameters()), optimizer) == 4 * (6 + 2)
    closed = torch.optim.LBFGS(module.parameters())
    assert state_bytes(list(module.parameters()), closed) is None
    assert all(one.grad is None for one in module.parameters())
    assert all(map(torch.equal, before, module.parameters()))


def test_schedulers_are_found_where_one_group_has_been_added_since_and_none_of_another_optimizer():
    optimizers = [torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1) for _ in range(3)]
    schedulers = [torch.optim.lr_scheduler.StepLR(one, 1) for one in optimizers[:2]]
    assert [attached_schedulers(one) for one in optimizers] == [[schedulers[0]], [schedulers[1]], []]
    optimizers[0].add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    assert attached_schedulers(optimizers[0]) == [schedulers[0]]


@pytest.mark.parametrize(
    "kind, coupled", [(torch.optim.SGD, True), (torch.optim.Adam, True), (torch.optim.AdamW, False)]
)
def test_a_weight_scales_rates_and_the_decay_that_is_in_the_gradient_for_a_while(kind, coupled):
    optimizer = kind([nn.Parameter(torch.zeros(1))], lr=0.5, weight_decay=0.25)
    (group,) = optimizer.param_groups
    assert coupled_decays(optimizer) == [0.25 if coupled else 0.0]
    for rate, decay in ((1.0, 1.0), (2.0, 1.0), (1.0, 4.0), (2.0, 4.0)):
        with scaled(optimizer, rate, decay):
            assert (group["lr"], group["weight_decay"]) == (0.5 * rate, 0.25 * (decay if coupled else 1.0))
        assert (group["lr"], group["weight_decay"]) == (0.5, 0.25)
    turned = kind([nn.Parameter(torch.zeros(1))], lr=0.5, weight_decay=0.25, maximize=True)
    assert coupled_decays(turned) == [-0.25 if coupled else 0.0]


# ---- what a job's functions return


@pytest.mark.parametrize("value", ["0.5", None, [0.5], {"a": 1}, torch.zeros(2), torch.zeros(0)])
def test_a_metric_is_one_number(value):
    _check_metrics(
        {"a": 1, "b": 0.5, "c": torch.tensor(2.0), "d": torch.tensor([3]), "e": np.float32(1), "f": True}
    )
    with pytest.raises(UsageError, match="metric 'bad' must be one number"):
        _check_metrics({"good": 1.0, "bad": value})
    with pytest.raises(UsageError, match="must return a dict"):
        _check_metrics([1.0])


def test_parameters_that_a_loss_does_not_reach_are_named_unless_its_graph_hides_them():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 1))
    module[2].bias.requires_grad_(False)
    x = torch.ones(3, 2, requires_grad=True)
    used = module[2](module[0](x) + module[0](x)).sum()  # twice by one path
    assert unused_parameters(module, used) == ["1.weight", "1.bias"]
    hidden = module[2](checkpoint(module[0], x, use_reentrant=True)).sum()
    assert unused_parameters(module, hidden) == []
    assert unused_parameters(module, torch.zeros(())) == [
        "0.weight",
        "0.bias",
        "1.weight",
        "1.bias",
        "2.weight",
    ]


def test_stepping_a_torch_scheduler_alone_says_nothing_and_a_factor_goes_by_epochs():
    module = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for ask in ("options", "factor"):
            schedule = TorchSchedule(
                lambda one: torch.optim.lr_scheduler.StepLR(one, 1, 0.5),
                Rates(optimizer),
                Ticks(16, Law(4, 2)),
            )
            for samples, rate in ((0, 1.0), (7, 1.0), (8, 0.5), (16, 0.25), (8, 0.5)):
                found = schedule.options_at(samples) if ask == "options" else schedule.factor(samples / 16, 2)
                assert [group["lr"] for group in found] == [rate]


# ---- what travels


@pytest.mark.parametrize("values", [torch.zeros(3), torch.zeros(4, dtype=torch.float16), torch.zeros(5)])
def test_a_push_of_other_numbers_than_a_shard_has_is_refused_by_name(values):
    _, model, (store,) = made(True, "sgd", mt.Sync())
    message = join([Section(What.DENSE, values=values)], model.lookups.sizes(0))
    with pytest.raises(WireError, match="rank 2 pushes"):
        store.arrive(2, VariableBuffer(message))
    whole = join([Section(What.DENSE, values=torch.ones(4))], model.lookups.sizes(0))
    payload = VariableBuffer(whole)
    assert store.arrive(2, payload).dense.body.tolist() == [1.0] * 4 and payload.wire_buffer.users == 0


@pytest.mark.parametrize("topology, mixes", [("ring", True), ("full", False)])
def test_what_a_peer_keeps_back_is_told_as_its_rule_keeps_it(topology, mixes):
    strategy = mt.Decentralized(topology, codec=mt.TopK(density=0.25, dense_below=0))
    job = toy.make_job()
    module, optimizer = build(job, None, torch.device("cpu"))
    reader = job.data.reader(None, 0)
    replica = PeerReplica(
        flat_model(module, optimizer, mt.Sync()),
        optimizer,
        strategy,
        0,
        toy.recipe(job.loss, 3),
        toy.leases(reader),
    )
    assert strategy.mixes == mixes and "residual_norm" not in replica.statistics()
    replica.update()
    replica._kept = 7.0
    told = replica.statistics(with_norm=True)["residual_norm"]
    assert told == (7.0 if mixes else replica.encoder.residual_norm())


@pytest.mark.parametrize("codec", [mt.TopK(density=0.25, dense_below=0), mt.QSGD(dense_below=0)])
def test_a_copy_that_others_hold_comes_to_what_it_is_a_copy_of(codec):
    """Each message is of the difference alone: what the one before did not say is in it, and counts once."""
    job = toy.make_job(model=toy.linear_float32, loss=toy.linear_loss)
    module, optimizer = build(job, None, torch.device("cpu"))
    model, reader = flat_model(module, optimizer, mt.Sync()), job.data.reader(None, 0)
    strategy = mt.Decentralized("ring", codec=codec)
    replica = PeerReplica(model, optimizer, strategy, 0, toy.recipe(job.loss, 3), toy.leases(reader))
    replica._copy_of(0)
    replica.x.add_(torch.arange(1.0, replica.x.numel() + 1))
    left = [float((replica.x - replica._copy_of(0)).norm())]
    for _ in range(12):
        replica.copy(0, replica.update())
        left.append(float((replica.x - replica._copy_of(0)).norm()))
    assert left[-1] < 1e-3 * left[0]
    assert isinstance(codec, mt.QSGD) or (left == sorted(left, reverse=True) and left[8] < 1e-5)


@pytest.mark.parametrize("num_servers", [1, 2, 3, 5])
def test_what_one_server_holds_is_cut_for_several_and_joined_again(num_servers):
    """Two groups of parameters, of which the first has momenta of its elements and a count of its steps."""
    layout = Layout(("a", "b"), ((7,), (3, 2)), (0, 7), (7, 13), (0, 13), torch.float32, torch.float32)
    numbers = torch.arange(13.0)
    options = [{"lr": 0.1 * (1 + group), "params": [group]} for group in range(2)]
    whole = {
        "parameters": numbers,
        "optimizer": {
            "state": {0: {"momentum": -numbers[:7], "step": 4, "lazy": None}},
            "param_groups": options,
            "first": [{"lr": 1.0}, {"lr": 2.0}],
        },
    }
    cut = layout.cut_into(num_servers)
    parts = [reshard([whole], cut, shard) for shard in range(num_servers)]
    for shard, part in enumerate(parts):
        assert torch.equal(part["parameters"], numbers[cut.cuts[shard] : cut.cuts[shard + 1]])
        for position, (group, start, stop) in enumerate(cut.group_slices(shard)):
            held = part["optimizer"]["state"].get(position, {})
            assert (held.get("step"), "lazy" in held) == ((4, True) if group == 0 else (None, False))
            low = cut.cuts[shard]
            assert group == 1 or torch.equal(held["momentum"], -numbers[low + start : low + stop])
            assert part["optimizer"]["param_groups"][position] == {**options[group], "params": [position]}
            assert part["optimizer"]["first"][position] == {"lr": 1.0 + group}
    again = reshard(parts, layout, 0)
    assert torch.equal(again["parameters"], numbers)
    assert torch.equal(again["optimizer"]["state"][0]["momentum"], -numbers[:7])
    assert again["optimizer"]["param_groups"] == options and again["optimizer"]["state"][0]["step"] == 4
