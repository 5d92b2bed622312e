"""The course of all codecs: round trip, odd inputs, determinism, honest bytes, conservation, state."""

import math

import pytest
import torch

from mpitrain import strategies
from mpitrain.codecs import Field, Part, add_message
from mpitrain.codecs.message_format import HEADER_BYTES
from mpitrain.errors import UsageError, WireError
from mpitrain.system.looking import only_looking
from mpitrain.values import names
from tests.codecs.course import (
    COURSE,
    LAYOUT,
    NUMEL,
    decoded,
    dyadic,
    gradients,
    make_encoder,
    part,
    residual,
    whole,
)

DENSE = [field for field in LAYOUT if field.numel < 1024]
WITH_RESIDUAL = [name for name in COURSE if make_encoder(COURSE[name].codec).residual]
course = pytest.mark.parametrize("name", COURSE)


def test_every_registered_codec_runs_the_course():
    assert {entry.codec.name for entry in COURSE.values()} == set(names("codec")) - {"none"}


@course
def test_what_is_sent_and_what_is_kept_is_the_gradient(name):
    """D(q) + r = r_before + x: to the bit for copied values and a rounded tau (oracle 11), else to rounding."""
    entry = COURSE[name]
    encoder = make_encoder(entry.codec)
    for step in range(4):
        before, x = residual(encoder), gradients(step)
        u = before + x
        sent = decoded(encoder.encode(part(x)))
        if not encoder.residual:
            bound = {"float16": 2**-11, "bfloat16": 2**-8, "qsgd": math.inf}[name]
            assert ((sent - x).abs() <= bound * x.abs() + 2**-24).all()
        elif entry.exact:
            assert torch.equal(sent + residual(encoder), u)
        else:
            assert torch.allclose(sent + residual(encoder), u, rtol=1e-6, atol=1e-8)
        assert torch.equal(x, gradients(step))


@pytest.mark.parametrize(
    "name", ["threshold", "threshold power of two", "threshold raw", "threshold elias_fano", "topk"]
)
def test_over_many_steps_nothing_is_lost_to_the_bit_on_dyadic_data(name):
    """sum of sent + residual == sum of gradients, float32, 60 steps (oracle 11)."""
    encoder = make_encoder(COURSE[name].codec)
    sent, total = torch.zeros(NUMEL), torch.zeros(NUMEL)
    for step in range(60):
        total += dyadic(step)
        add_message(encoder.encode(part(dyadic(step))), part(sent))
    assert torch.equal(sent + residual(encoder), total)
    assert residual(encoder).abs().max() > 0


@pytest.mark.parametrize("name", WITH_RESIDUAL)
def test_a_dense_message_empties_the_residual(name):
    encoder = make_encoder(COURSE[name].codec)
    encoder.encode(part(gradients()))
    kept = residual(encoder)
    assert kept.abs().max() > 0
    assert torch.equal(decoded(encoder.encode(part(gradients(1)), dense=True)), gradients(1) + kept)
    assert residual(encoder).abs().max() == 0


@course
def test_small_parameters_travel_in_full(name):
    sent = decoded(make_encoder(COURSE[name].codec).encode(part(gradients())))
    assert DENSE
    for field in DENSE:
        span = slice(field.start, field.start + field.numel)
        assert torch.equal(sent[span], gradients()[span])


@course
def test_messages_depend_on_state_seed_and_gradient_alone(name):
    first, second = make_encoder(COURSE[name].codec, seed=3), make_encoder(COURSE[name].codec, seed=3)
    for step in range(3):
        message = first.encode(part(gradients(step)))
        assert torch.equal(message, second.encode(part(gradients(step))))
        assert message.dtype == torch.uint8 and first.statistics()["bytes"] == message.numel()


@course
def test_the_byte_count_is_what_the_parts_take(name):
    """Header, dense numbers, and at most `bits` for each coded number; nothing beside the message is needed."""
    entry = COURSE[name]
    encoder = make_encoder(entry.codec)
    for step in range(3):
        message = encoder.encode(part(gradients(step)))
        num_dense = sum(field.numel for field in DENSE)
        coded = NUMEL - num_dense
        counted = encoder.statistics()["density"] * coded if entry.sparse else coded
        assert 0 < counted <= coded
        assert message.numel() <= HEADER_BYTES + 4 * num_dense + entry.bits * counted / 8 + 8
    assert torch.isfinite(decoded(message.clone())).all()


@course
def test_odd_inputs(name):
    """No numbers, one number, zeros, all equal, one large among zeros, a run of large ones."""
    codec = COURSE[name].codec
    for numel in (0, 1, 1023, 1024, 1025):
        make_encoder(codec).encode(whole(torch.ones(numel)))
        flat = torch.full((numel,), 5.0)
        add_message(make_encoder(codec).encode(whole(torch.zeros(numel))), whole(flat))
        assert torch.equal(flat, torch.full((numel,), 5.0))
    for indices in (torch.arange(3000), torch.tensor([1500]), torch.arange(1000, 1100)):
        encoder = make_encoder(codec)
        x = torch.zeros(3000)
        x[indices] = 1.0
        sent = torch.zeros(3000)
        add_message(encoder.encode(whole(x)), whole(sent))
        kept = encoder.memory.state().get("residual/flat", torch.zeros(3000))
        assert torch.isfinite(sent).all()
        if encoder.residual:
            assert torch.allclose(sent + kept, x, atol=1e-6)
    encoder = make_encoder(codec)
    encoder.encode([])


@course
def test_state_saved_and_restored_goes_on_to_the_bit(name):
    """Oracle 22: also into an encoder that sees the parameters in another order."""
    one = make_encoder(COURSE[name].codec, seed=5)
    for step in range(3):
        one.encode(part(gradients(step)))
    state = one.state()
    other = make_encoder(COURSE[name].codec, seed=5)
    other.restore(state)
    for step in range(3, 6):
        assert torch.equal(one.encode(part(gradients(step))), other.encode(part(gradients(step))))
    assert all(torch.equal(v, other.state()["tensors"][k]) for k, v in one.state()["tensors"].items())
    for tensor in state["tensors"].values():
        assert tensor.device.type == "cpu"


@pytest.mark.parametrize("name", WITH_RESIDUAL)
def test_what_is_kept_back_is_copied_but_for_who_only_looks_at_it(name):
    encoder = make_encoder(COURSE[name].codec)
    encoder.encode(part(gradients()))

    def places():
        return {one.data_ptr() for one in encoder.memory.state().values() if one.numel()}

    with only_looking():
        looked_at = places()
        assert looked_at and looked_at == places()
    assert places().isdisjoint(looked_at)


@pytest.mark.parametrize("name", WITH_RESIDUAL)
def test_residuals_follow_the_names_when_buckets_are_rebuilt(name):
    encoder = make_encoder(COURSE[name].codec)
    encoder.encode(part(gradients()))
    before = encoder.memory.state()
    pieces = {f.name: gradients(1)[f.start : f.start + f.numel] for f in LAYOUT}
    rebuilt = [
        Part(torch.cat([pieces[f.name] for f in group]), _packed(group))
        for group in (LAYOUT[3:], LAYOUT[:3][::-1])
    ]
    message = encoder.encode(rebuilt)
    out = [Part(torch.zeros_like(p.flat), p.layout) for p in rebuilt]
    add_message(message, out)
    after = encoder.memory.state()
    for p in out:
        for field in p.layout:
            sent = p.flat[field.start : field.start + field.numel]
            was = before[f"residual/{field.name}"].reshape(-1) + pieces[field.name]
            assert torch.allclose(sent + after[f"residual/{field.name}"].reshape(-1), was, atol=1e-7), field


def _packed(fields):
    found, start = [], 0
    for field in fields:
        found.append(Field(field.name, field.shape, start))
        start += field.numel
    return tuple(found)


@course
def test_a_gradient_that_is_not_finite_poisons_the_sum_and_not_the_residual(name):
    encoder = make_encoder(COURSE[name].codec)
    encoder.encode(part(gradients()))
    kept = residual(encoder)
    for bad in (math.nan, math.inf):
        x = gradients(1)
        x[17] = bad
        assert decoded(encoder.encode(part(x))).isnan().all()
    assert torch.equal(residual(encoder), kept)
    assert decoded(encoder.encode(part(gradients(2)))).isfinite().all()


@pytest.mark.parametrize("name", WITH_RESIDUAL)
def test_clipping_is_before_the_residual_and_per_worker(name):
    """A worker of four clips its gradient to norm clip / 2; what was kept is not clipped."""
    codec = type(COURSE[name].codec)(clip=0.5)
    encoder = make_encoder(codec, num_workers=4)
    x = gradients()
    sent = decoded(encoder.encode(part(x)))
    wanted = x * (0.25 / float(x.norm()))
    assert torch.allclose(sent + residual(encoder), wanted, atol=1e-7)
    kept = residual(encoder)
    sent = decoded(encoder.encode(part(torch.zeros(NUMEL))))
    assert torch.allclose(sent + residual(encoder), kept, atol=1e-7)


@course
def test_damaged_and_foreign_messages_are_refused(name):
    message = make_encoder(COURSE[name].codec).encode(part(gradients()))
    for bad in (message[: HEADER_BYTES - 1], message[:-1], torch.cat([message, message[:8]])):
        with pytest.raises(WireError):
            decoded(bad)
    with pytest.raises(WireError):
        add_message(message, whole(torch.zeros(5000)))
    with pytest.raises(UsageError, match="float32"):
        make_encoder(COURSE[name].codec).encode(whole(torch.zeros(5000, dtype=torch.float64)))


def test_warm_up_travels_in_full():
    encoder = make_encoder(strategies.Threshold(warmup_steps=2))
    for step in range(2):
        assert torch.equal(decoded(encoder.encode(part(gradients(step)))), gradients(step))
    assert encoder.encode(part(gradients(2))).numel() < NUMEL
