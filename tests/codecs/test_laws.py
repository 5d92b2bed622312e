"""What each codec's paper promises (reference sections 5 and 12, oracles 11-15)."""

import itertools
import math

import pytest
import torch

from mpitrain import strategies
from mpitrain.codecs import Part, add_message, whole
from mpitrain.codecs.layout import CHUNK
from mpitrain.codecs.qsgd import QsgdEncoder
from mpitrain.codecs.threshold import ThresholdEncoder
from mpitrain.codecs.topk import TopKEncoder
from mpitrain.model.wire.codec_registry import make_encoder, make_layout_of
from tests.codecs.course import LAYOUT, NUMEL, decoded, gradients, part, residual

D = 0.5 ** (1 / 20)
ENDS = torch.tensor([0, 512, 600, 1112])  # of each bucket one, so that all have the same largest number


def test_tau_moves_by_d_in_both_directions_and_rests_in_the_band():
    """Oracle 13: after k steps out of band tau is tau0 d^(+-k), in float64."""
    low = ThresholdEncoder(density=0.01, tau=1e3)
    for _ in range(30):
        low.encode(part(gradients()))
    assert low.tau == pytest.approx(1e3 * D**30, rel=1e-12)
    high = ThresholdEncoder(density=0.01, tau=1e-4)
    for _ in range(15):
        high.encode(part(gradients(scale=1.0)))
    assert high.tau == pytest.approx(1e-4 * D**-15, rel=1e-12)
    resting = ThresholdEncoder(density=0.5, tau=2.0**-7, band=4.0)
    for _ in range(5):
        resting.encode(part(gradients()))
    assert resting.tau == 2.0**-7
    fixed = ThresholdEncoder(density=0.01, tau=1e3, adaptive=False)
    fixed.encode(part(gradients()))
    assert fixed.tau == 1e3


@pytest.mark.parametrize("start", [0.0, 1e-4, 0.3])
def test_the_density_comes_to_rest_in_the_band_from_either_side(start):
    """On stationary noise; from far above, the first sends wait until a residual has walked there."""
    encoder = ThresholdEncoder(density=0.01, tau=start)
    densities = []
    for step in range(300):
        encoder.encode(whole(gradients(step)))
        densities.append(encoder.statistics()["density"])
    tail = densities[-100:]
    assert min(tail) >= 0.01 / 2.5 and max(tail) <= 0.01 * 2.5


def test_powers_of_two_swing():
    """Why eighths are the default: the same noise, messages up to several times the target for ever."""
    encoder = ThresholdEncoder(density=0.01, rounding="power_of_two")
    densities = []
    for step in range(300):
        encoder.encode(whole(gradients(step)))
        densities.append(encoder.statistics()["density"])
    assert max(densities[-100:]) > 10 * 0.01 and min(densities[-100:]) == 0.0


@pytest.mark.parametrize(
    ("rounding", "tau"),
    [("power_of_two", 2.0**-7), ("eighth", 11 / 1024), ("none", float(torch.tensor(0.0107)))],
)
def test_tau_in_use_is_rounded_and_travels(rounding, tau):
    encoder = ThresholdEncoder(density=0.05, tau=0.0107, rounding=rounding)
    x = gradients()
    sent = decoded(encoder.encode(part(x)))[: LAYOUT[0].numel]
    assert sent.abs().unique().tolist() == [0.0, tau] == [0.0, encoder.statistics()["tau"]]
    assert torch.equal(sent != 0, x[: LAYOUT[0].numel].abs() >= tau)


def test_a_bitmap_above_one_in_sixteen():
    for tau, name in ((0.015, "bitmap"), (0.03, "rice")):
        encoder = ThresholdEncoder(tau=tau, rounding="none", adaptive=False)
        message = encoder.encode(part(gradients()))
        density = encoder.statistics()["density"]
        assert (density > 1 / 16) == (name == "bitmap")
        assert ["raw", "bitmap", "elias_fano", "rice"][int(message[3])] == name


def test_a_thousandth_of_the_numbers_is_a_thousandth_of_the_bytes_and_less():
    """At density p a message has n (H(p) + p) bits at best: 2578 times less than float32 for p = 1e-3; p = 2.8e-3 is
    where a thousand ends."""
    n = 2_000_000
    x = torch.zeros(n)
    x[torch.randperm(n, generator=torch.Generator().manual_seed(1))[: n // 1000]] = 1.0
    message = ThresholdEncoder(tau=1.0, adaptive=False).encode(whole(x))
    assert 4 * n / message.numel() >= 2400
    by_hand = TopKEncoder(density=1e-3, values="float16").encode(whole(torch.randn(n)))
    assert 4 * n / by_hand.numel() >= 900


def test_dgc_masks_both_memories_where_it_sent():
    """Oracle 12."""
    encoder = make_encoder(strategies.TopK(density=0.05, momentum=0.9))
    encoder.encode(part(gradients()))
    sent = decoded(encoder.encode(part(gradients(1))))
    tensors = encoder.memory.state()
    for field in LAYOUT:
        where = sent[field.start : field.start + field.numel].reshape(field.shape) != 0
        assert (tensors[f"residual/{field.name}"][where] == 0).all()
        if field.numel >= 1024:
            assert (tensors[f"momentum/{field.name}"][where] == 0).all()
            assert (tensors[f"momentum/{field.name}"][~where] != 0).any()


def test_dgc_with_everything_sent_is_plain_sgd_and_dense_is_momentum_sgd():
    """Oracle 12: k = n with masking sends x every step; the dense branch sends the velocity."""
    masked = make_encoder(strategies.TopK(density=1.0, momentum=0.9, dense_below=0))
    for step in range(4):
        assert torch.equal(decoded(masked.encode(part(gradients(step)))), gradients(step))
    dense = make_encoder(strategies.TopK(momentum=0.9, warmup_steps=10))
    weights = torch.zeros(NUMEL, requires_grad=True)
    optimizer = torch.optim.SGD([weights], lr=1.0, momentum=0.9)
    ours = torch.zeros(NUMEL)
    for step in range(4):
        weights.grad = gradients(step)
        optimizer.step()
        ours -= decoded(dense.encode(part(gradients(step))))
    assert torch.equal(ours, weights.detach())


def test_nesterov_of_dgc_is_torchs_where_nothing_is_masked_and_its_own_where_it_is():
    """Oracle 12: v = mu v + x, and mu v + x enters the residual."""
    dense = make_encoder(strategies.TopK(momentum=0.9, nesterov=True, warmup_steps=10))
    weights = torch.zeros(NUMEL, requires_grad=True)
    optimizer = torch.optim.SGD([weights], lr=1.0, momentum=0.9, nesterov=True)
    ours = torch.zeros(NUMEL)
    for step in range(4):
        weights.grad = gradients(step)
        optimizer.step()
        ours -= decoded(dense.encode(part(gradients(step))))
    torch.testing.assert_close(ours, weights.detach(), rtol=1e-5, atol=1e-7)
    masked = TopKEncoder(density=0.25, momentum=0.5, nesterov=True, dense_below=0)
    kept, velocity = torch.zeros(4), torch.zeros(4)
    for step, x in enumerate(([8.0, 1.0, 2.0, 4.0], [1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 8.0, 0.0])):
        velocity = 0.5 * velocity + torch.tensor(x)
        kept += 0.5 * velocity + torch.tensor(x)
        largest = int(kept.abs().argmax())
        received = torch.zeros(4)
        add_message(masked.encode(whole(torch.tensor(x))), whole(received))
        assert received.tolist() == [kept[i].item() if i == largest else 0.0 for i in range(4)], step
        kept[largest] = velocity[largest] = 0.0


def test_of_few_numbers_all_are_looked_at_and_the_largest_are_sent_to_the_number():
    """Below two least samples every number is in the sample, whatever the step."""
    for n in (60, 1500):
        encoder, numbers = TopKEncoder(density=0.1, dense_below=0), torch.arange(1.0, n + 1)
        for step in range(3):
            sent = decoded_of(
                encoder, numbers[torch.randperm(n, generator=torch.Generator().manual_seed(step))]
            )
            assert int((sent != 0).sum()) == n // 10, (n, step)


def test_of_many_numbers_every_hundredth_is_looked_at():
    """260 of them are 2.6 of the sample, so its third largest is the threshold."""
    n = 409_600
    encoder = TopKEncoder(density=260 / n, dense_below=0)
    encoder.encode(whole(torch.arange(1.0, n + 1)))
    assert round(encoder.statistics()["density"] * n) == 300


def decoded_of(encoder, numbers):
    """What others add of one message of an encoder that keeps nothing back from before."""
    encoder.memory.clear(encoder.residual)
    received = torch.zeros(len(numbers))
    add_message(encoder.encode(whole(numbers)), whole(received))
    return received


@pytest.mark.parametrize("density", [0.02, 0.05, 0.3])
def test_the_threshold_is_the_order_statistic_of_the_sample_that_stands_for_the_kth_number(density):
    """On magnitudes in order every 100th number is in the sample, so the rank says how many are sent, to the number."""
    n, stride = 102_400, 100
    encoder = TopKEncoder(density=density, dense_below=0)
    encoder.encode(whole(torch.arange(1.0, n + 1)))
    rank = round(density * n / stride)
    assert round(encoder.statistics()["density"] * n) == rank * stride


@pytest.mark.parametrize(
    "density, seed, num_sent",
    [
        (0.001, 0, 100),  # the sample's largest, and those above it that are in no sample
        (0.001, 7, 93),  # the sample begins at the seventh
        (0.0008, 0, 100),  # 82 are wanted, and up to 1.3 times as many are near enough
        (0.0003, 0, 31),  # those would be far too many: the largest of them, to the number
        (0.00001, 0, 1),
        (0.0000001, 0, 1),  # never none
    ],
)
def test_where_few_are_wanted_the_largest_of_the_sample_is_the_threshold(density, seed, num_sent):
    n = 102_400
    encoder = TopKEncoder(density=density, dense_below=0, seed=seed)
    encoder.encode(whole(torch.arange(1.0, n + 1)))
    assert round(encoder.statistics()["density"] * n) == num_sent


@pytest.mark.parametrize("n", [5_000, 300_000])
def test_the_sampled_threshold_sends_about_k(n):
    for step in range(5):
        generator = torch.Generator().manual_seed(step)
        encoder = TopKEncoder(density=0.01, dense_below=0)
        x = torch.randn(n, generator=generator)
        encoder.encode(whole(x))
        assert 0.8 <= encoder.statistics()["density"] / 0.01 <= 1.3


def test_onebit_residuals_of_a_column_sum_to_zero():
    """Per column and sign, and the two values are the column's means."""
    encoder = make_encoder(strategies.OneBit())
    x = gradients()
    sent = decoded(encoder.encode(part(x)))
    field = LAYOUT[0]
    u, q = (t[field.start : field.start + field.numel].view(field.shape) for t in (x, sent))
    r = residual(encoder)[: field.numel].view(field.shape)
    for row in range(field.shape[0]):
        for sign in (u[row] >= 0, u[row] < 0):
            assert r[row][sign].sum().abs() < 1e-6
            assert torch.allclose(q[row][sign], u[row][sign].mean(), rtol=1e-4)


def test_powersgd_recovers_a_matrix_of_its_rank_in_one_step():
    """Oracle 15."""
    generator = torch.Generator().manual_seed(0)
    left, right = torch.randn(96, 2, generator=generator), torch.randn(2, 64, generator=generator)
    x = torch.zeros(NUMEL)
    x[: 96 * 64] = (left @ right).view(-1)
    encoder = make_encoder(strategies.PowerSGD(rank=2))
    assert torch.allclose(decoded(encoder.encode(part(x)))[: 96 * 64], x[: 96 * 64], atol=1e-5)


def test_powersgd_of_n_workers_is_powersgd_of_the_mean():
    """Linear: the reduced result of workers equals that of one worker with their mean gradient."""
    encoders = [make_encoder(strategies.PowerSGD(rank=2), 3, worker) for worker in range(3)]
    alone = make_encoder(strategies.PowerSGD(rank=2))
    for step in range(3):
        xs = [gradients(step, worker=worker) for worker in range(3)]
        results = _lockstep(encoders, xs)
        for result in results[1:]:
            assert torch.equal(result, results[0])
        single = torch.stack(xs).mean(0)
        alone.reduce(part(single), lambda tensor: None)
        assert torch.allclose(results[0], single, atol=2e-5)


def _lockstep(encoders, xs):
    """Run every worker's `reduce` in a thread that meets the others in `mean`."""
    import threading

    barrier, box = threading.Barrier(len(xs)), {}

    def run(index):
        def mean(tensor):
            box[index] = tensor.clone()
            barrier.wait(30)
            total = torch.stack([box[worker] for worker in range(len(xs))]).mean(0)
            barrier.wait(30)
            tensor.copy_(total)

        encoders[index].reduce(part(xs[index]), mean)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(xs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return xs


def test_powersgd_of_a_poisoned_worker_leaves_all_residuals():
    encoders = [make_encoder(strategies.PowerSGD(rank=2), 2, worker) for worker in range(2)]
    _lockstep(encoders, [gradients(0), gradients(1)])
    kept = [residual(encoder) for encoder in encoders]
    bad = gradients(2)
    bad[5] = math.nan
    for result in _lockstep(encoders, [bad, gradients(3)]):
        assert result.isnan().all()
    assert all(torch.equal(residual(encoder), was) for encoder, was in zip(encoders, kept, strict=True))


def test_qsgd_is_unbiased_and_within_its_variance():
    """Oracle 15: E[q] = x; E|q - x|^2 <= min(n/s^2, sqrt(n)/s) |x|^2 for a bucket of n."""
    n, levels, draws = 512, 4, 400
    x = torch.randn(n, generator=torch.Generator().manual_seed(0))
    encoder = make_encoder(strategies.QSGD(levels=levels, dense_below=0))
    total, error = torch.zeros(n), 0.0
    for _ in range(draws):
        q = torch.zeros(n)
        add_message(encoder.encode(whole(x)), whole(q))
        total += q
        error += float((q - x).square().sum()) / draws
    norm = float(x.norm())
    assert error <= min(n / levels**2, math.sqrt(n) / levels) * norm**2
    step = float(x.abs().max()) / levels
    spread = step / 2 / math.sqrt(draws)  # of the mean of a two-valued draw, at most
    assert ((total / draws - x).abs() <= 6 * spread).all()


def test_what_is_a_level_of_qsgd_already_is_sent_as_it_is_whatever_is_drawn():
    """Draws lie between 0 and 1: of half a million of them, 8 are the least and 8 the largest there is."""
    x = torch.arange(1 << 19).remainder(9).sub(4).div(4)
    q = torch.zeros_like(x)
    add_message(make_encoder(strategies.QSGD(levels=4, dense_below=0)).encode(whole(x)), whole(q))
    assert torch.equal(q, x)


def test_residuals_dealt_to_another_number_of_workers_keep_their_mean():
    """4 workers' states to 2 and to 6: the sum over workers / workers stays; who gets none has the others' step."""
    from mpitrain.model.wire.codec_registry import merge_states

    encoders = [make_encoder(strategies.Threshold(density=0.05), 4, worker) for worker in range(4)]
    for worker, encoder in enumerate(encoders):
        encoder.encode(part(gradients(worker=worker)))
    states = [encoder.state() for encoder in encoders]
    before = sum(residual(encoder) for encoder in encoders) / 4
    for size in (2, 4, 6):
        heirs = [make_encoder(strategies.Threshold(density=0.05), size, worker) for worker in range(size)]
        for worker, heir in enumerate(heirs):
            heir.restore(merge_states(states[0], states[worker::size], size / 4))
        assert torch.allclose(sum(residual(heir) for heir in heirs) / size, before, atol=1e-7)
        assert {heir.step for heir in heirs} == {1}
    assert torch.equal(residual(encoders[2]), _restored(states[2]))


def _restored(state):
    heir = make_encoder(strategies.Threshold(density=0.05))
    heir.restore(state)
    return residual(heir)


@pytest.mark.parametrize(
    "text",
    ["threshold(density=2)", "threshold(band=0.5)", "topk(momentum=1)", "topk(values='int8')", "qsgd(levels=0)",
     "powersgd(rank=0)", "eightbit(clip=-1)", "threshold(coding='zip')", "topk(nesterov=True)",
     "onebit(warmup_steps=-1)", "threshold(rounding='half')"],
)  # fmt: skip
def test_wrong_options_are_refused(text):
    from mpitrain.errors import UsageError
    from mpitrain.values import parse

    with pytest.raises(UsageError):
        parse(text, "codec")


def test_the_text_of_an_allreduce_with_a_codec():
    from mpitrain.values import parse

    value = parse("allreduce(codec=threshold(density=0.01))", "strategy")
    assert value == strategies.AllReduce(codec=strategies.Threshold(density=0.01))
    assert parse(str(value), "strategy") == value
    assert str(strategies.AllReduce()) == "allreduce()"


def test_the_noise_of_qsgd_is_another_for_every_seed_worker_message_and_parameter_and_the_same_again():
    def sent(seed=3, worker=1, step=2, name="a"):
        encoder = make_encoder(strategies.QSGD(levels=3, dense_below=0), worker=worker, seed=seed)
        layout = make_layout_of([(name, (600,)), ("other", (600,))])
        for _ in range(step):
            message = encoder.encode([Part(torch.full((1200,), 0.1).index_fill_(0, ENDS, 1.0), layout)])
        found = torch.zeros(1200)
        add_message(message, [Part(found, layout)])
        return found

    first = sent()
    assert torch.equal(first, sent())
    assert not torch.equal(first[:600], first[600:]), "another parameter in the same message"
    others = [sent(seed=4), sent(worker=2), sent(step=3), sent(seed=2**64 + 4)]
    found = [first, *others[:3]]
    assert all(not torch.equal(a[:600], b[:600]) for a, b in itertools.combinations(found, 2))
    assert torch.equal(others[0], others[3]), "a seed of any size"
    renamed = sent(name="b")
    assert not torch.equal(first[:600], renamed[:600]) and torch.equal(first[600:], renamed[600:])
    large = torch.full((2 * CHUNK,), 0.1)
    large[0] = large[CHUNK] = 1.0
    again = torch.zeros(2 * CHUNK)
    add_message(QsgdEncoder(levels=3, dense_below=0).encode(whole(large)), whole(again))
    assert not torch.equal(again[:512], again[CHUNK : CHUNK + 512]), "each piece of a long one"


@pytest.mark.parametrize("codec", [strategies.PowerSGD(), strategies.QSGD()])
def test_any_seed_that_torch_takes_keys_a_codec(codec):
    messages = []
    for seed in (-3, 5, 5 + 2**32, 2**63):
        encoder = make_encoder(codec, seed=seed)
        messages.append(bytes(encoder.encode(part(gradients()))))
        assert messages[-1] == bytes(make_encoder(codec, seed=seed).encode(part(gradients())))
    assert len(set(messages)) == 4, "two seeds draw the same"


def test_qsgd_of_a_bucket_of_zeros_casts_no_nan():
    """A NaN has no whole number: what it becomes differs between machines. The level of 0 is the code `levels`."""
    from mpitrain.codecs.bits import num_packed_bytes, unpack_bytes

    for levels in (1, 7, 100):
        encoder = make_encoder(strategies.QSGD(levels=levels))
        message = encoder.encode(part(torch.zeros(NUMEL)))
        width = (2 * levels).bit_length()
        codes = message[-num_packed_bytes(LAYOUT[-1].numel, width) :].numpy()
        assert set(unpack_bytes(codes, width, LAYOUT[-1].numel).tolist()) == {levels}
        assert not decoded(message).any()
