"""The table of values: what is made from a row, and that a new value is one file and one row."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import mpitrain
from mpitrain import strategies
from mpitrain.strategies import registry
from mpitrain.values import registered
from tests.ranks import warm_command

PACKAGE = Path(mpitrain.__file__).parent

EXPONENTIAL = '''\
"""The damping `exponential`: an exponential of the staleness."""

from __future__ import annotations

import math
from typing import ClassVar

from mpitrain.errors import UsageError
from mpitrain.strategies.damping.base import Damping
from mpitrain.values import register


@register("damping", "exponential")
class Exponential(Damping):
    """A gradient counts by an exponential of its staleness: c(tau) = exp(-beta tau)."""

    scales: ClassVar[bool] = True

    beta: float = 0.1

    def check(self) -> None:
        if not 0 <= self.beta < float("inf"):
            raise UsageError(f"exponential: beta must be finite and not negative, got {self.beta}")

    def weight(self, staleness: int) -> float:
        return math.exp(-self.beta * staleness)
'''

TRUST = '''\
"""The damping `trust`: numbers whose parameters have moved far are left out."""

from __future__ import annotations

from typing import Any, ClassVar

from mpitrain.strategies.damping.base import Correction, Damping, Numbers
from mpitrain.values import register


class TrustRegion(Correction):
    """g <- g where |w_now - w_read| <= radius, else 0."""

    watches_updates: ClassVar[bool] = True

    def __init__(self, radius: float):
        self.radius, self.num_updates = radius, 0

    def apply(self, gradient: Numbers, now: Numbers, read: Numbers) -> None:
        gradient.mul_((now - read).abs() <= self.radius)

    def on_update(self, before: Numbers, after: Numbers) -> None:
        self.num_updates += 1

    def state(self) -> dict[str, Any]:
        return {"num_updates": self.num_updates}


@register("damping", "trust")
class Trust(Damping):
    """A number of the gradient counts while its parameter is near to where it was read."""

    correction: ClassVar = TrustRegion
    one_gradient: ClassVar[str] = "trusts one gradient"

    radius: float = 1.0
'''

EVERY_SECOND = '''\
"""Asynchronous SGD that takes every second push of each worker."""

from __future__ import annotations

from typing import Any

from mpitrain.strategies.base import Arrival, ServerStrategy, Verdict
from mpitrain.values import register


@register("strategy", "every_second")
class EverySecond(ServerStrategy):
    """A server applies every second gradient of each worker on arrival, and drops the others."""

    first: int = 0

    def start(self, workers: tuple[int, ...]) -> dict[str, Any]:
        return {}

    def on_push(self, memory: dict[str, Any], arrival: Arrival) -> Verdict:
        taken = arrival.step % 2 == self.first
        weight = self.damping.weight(arrival.version - arrival.read) if taken else 0.0
        return Verdict(weight, flush=weight > 0, release=(arrival.worker,))
'''

SIGNS = '''\
"""The codec `signs`: the sign of each number, times the mean magnitude of its parameter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from mpitrain.codecs import message_format
from mpitrain.codecs.base import Feedback
from mpitrain.codecs.encoder import Encoder
from mpitrain.codecs.layout import Part, Plan
from mpitrain.codecs.lazy import np, torch
from mpitrain.codecs.message_format import Decoder, Received
from mpitrain.codecs.sparse import pack_signs, unpack_signs
from mpitrain.values import register

SIGNS = 11


class SignsEncoder(Encoder):
    """Signs and one mean a parameter, with error feedback."""

    def _encode(self, parts: Sequence[Part], plan: Plan, alpha: float) -> torch.Tensor:
        kept = self.memory.slot("residual", parts)
        means, negative = [], []
        for part, field, _ in plan.fields:
            u = kept[part][field.start : field.start + field.numel]
            u.add_(parts[part].flat[field.start : field.start + field.numel], alpha=alpha)
            means.append(u.abs().mean().view(1))
            negative.append((u < 0).numpy())
            u.sub_(torch.where(u < 0, -means[-1], means[-1]))
        dense = message_format.dense_numbers(parts, plan, alpha)
        signs = pack_signs(np.concatenate(negative))
        return message_format.assemble(self._header(plan, SIGNS), [dense, *means, signs])


def add(received: Received) -> None:
    """parts += weight * (+-mean)."""
    _, reader, parts, plan, weight = received
    means = [float(reader.take(1, "<f4")[0]) for _ in plan.fields]
    signs = unpack_signs(reader.take((plan.num_coded + 7) // 8, "|u1"), plan.num_coded)
    for (part, field, offset), mean in zip(plan.fields, means, strict=True):
        into = parts[part].flat[field.start : field.start + field.numel]
        into.add_(signs[offset : offset + field.numel], alpha=weight * mean)


@register("codec", "signs")
class Signs(Feedback):
    """Signs, and the mean magnitude of each parameter: 32 times fewer bytes."""

    encoder: ClassVar = SignsEncoder
    decoders: ClassVar = {SIGNS: Decoder(add)}
'''


@pytest.fixture
def copy(tmp_path):
    """A copy of the package, bytecode too. Called with a file, its text and a row of the table, it adds them; called
    with a program, it runs that on the copy and returns what it prints as JSON."""
    shutil.copytree(PACKAGE, tmp_path / "mpitrain")

    def add(path, text, public):
        (tmp_path / "mpitrain" / path).write_text(text)
        table = tmp_path / "mpitrain" / "strategies" / "registry.py"
        module = path.removesuffix(".py").replace("/", ".")
        first, rest = table.read_text().split("MODULES = {\n", 1)
        table.write_text(f'{first}MODULES = {{\n    "{public}": "{module}",\n{rest}')

    def run(program, warm=True):
        environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
        (ranks := tmp_path / "ranks").mkdir(exist_ok=True)
        done = subprocess.run(
            warm_command(["-c", program], ranks) if warm else [sys.executable, "-c", program],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    run.add = add
    return run


def test_every_row_is_a_registered_value_of_that_name_and_has_a_summary():
    rows = registry.rows()
    assert [row.public for row in rows] == list(registry.MODULES)
    for row in rows:
        cls = getattr(mpitrain, row.public)
        assert cls is getattr(strategies, row.public) and cls in registered(row.kind) and cls.name == row.name
        assert row.signature.startswith(f"{row.name}(") and row.summary.endswith(".")
        assert len(row.summary) <= 110, row.summary
        assert row.public in mpitrain.__all__


@pytest.mark.parametrize("kind", ["strategy", "damping", "codec", "schedule", "warmup", "batching", "outer"])
def test_every_registered_value_has_a_row(kind):
    assert {cls.name for cls in registered(kind)} == {row.name for row in registry.rows(kind)}


def test_importing_the_package_imports_no_value(copy):
    loaded = "import json, sys, mpitrain; print(json.dumps([m for m in sys.modules if '.strategies' in m]))"
    assert copy(loaded, warm=False) == []
    asked = loaded.replace("import json, sys, mpitrain", "import json, sys, mpitrain; mpitrain.__all__")
    assert copy(asked, warm=False) == ["mpitrain.strategies.registry", "mpitrain.strategies"]


def test_a_new_damping_is_one_file_and_one_row(copy):
    copy.add("strategies/damping/exponential.py", EXPONENTIAL, "Exponential")
    made = copy(
        """
import contextlib, io, json
import mpitrain as mt
from mpitrain.cli.main import main
from mpitrain.strategies import registry
from mpitrain.values import parse
from mpitrain.virtual import Exponential  # the law of computing times bears the same name in texts
told = io.StringIO()
with contextlib.redirect_stdout(told), contextlib.suppress(SystemExit):
    main(["train", "--help"])
value = parse("async(damping=exponential(beta=0.5))", "strategy")
print(json.dumps({
    "public": "Exponential" in mt.__all__,
    "repr": repr(value),
    "text": str(value),
    "same": value == mt.Async(damping=mt.Exponential(0.5)),
    "law": [repr(parse("exponential(2.0)", "compute")), parse("exponential(2.0)", "compute") == Exponential(2.0)],
    "weights": [mt.Exponential(0.5).weight(tau) for tau in (0, 1, 4)],
    "help": "  exponential(beta=0.1)" in told.getvalue(),
    "row": registry.rows("damping")[0],
}))
"""
    )
    assert made["public"] and made["same"] and made["help"]
    assert made["text"] == "async(damping=exponential(beta=0.5))"
    assert made["repr"] == "Async(damping=Exponential(beta=0.5))"
    assert made["law"] == ["Exponential(mean=2.0)", True]
    assert made["weights"] == pytest.approx([1.0, 0.6065306597126334, 0.1353352832366127], rel=1e-15)
    assert made["row"] == [
        *("damping", "exponential", "Exponential", "exponential(beta=0.1)", ""),
        "A gradient counts by an exponential of its staleness: c(tau) = exp(-beta tau).",
    ]


def test_a_damping_brings_its_correction_in_the_same_file(copy):
    """The server's store applies it, and saves its memory; what makes no sense for it is refused in its name."""
    copy.add("strategies/damping/trust.py", TRUST, "Trust")
    made = copy(
        """
import json
import torch
import mpitrain as mt
from mpitrain.errors import UsageError
from mpitrain.values import parse
from mpitrain.virtual import Constant, Ideal
from safetensors.torch import load_file
data = mt.Synthetic(64, x=((1,), "float32"))
def run(text):
    job = mt.Job(
        model=lambda: torch.nn.Linear(1, 1, bias=False), loss=lambda model, batch: model.weight.sum(), data=data,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0), batch_size=8, epochs=1, seed=3,
    )
    mt.simulate(job, parse(text, "strategy"), 4, Constant(jitter=0.0), Ideal(), run_dir="run", quiet=True)
    return float(load_file("run/model.safetensors")["weight"])
text = "async(damping=trust(radius={}))"
first = run(text.format(-1.0))
try:
    refused = str(parse("async(push_every=2,damping=trust())", "strategy"))
except UsageError as error:
    refused = str(error)
print(json.dumps({
    "moved": [first - run(text.format(radius)) for radius in (0.0, 1.5, 10.0)], "refused": refused,
}))
"""
    )
    assert made["refused"].startswith(
        "async: trust trusts one gradient, computed on parameters as they were read"
    )
    # Every gradient is 1, so each that counts moves the parameter by 1; 4 workers push in turn, twice. Without
    # staleness nothing is corrected: of radius -1 the first push counts, of radius 0 each round's first, of 1.5 each
    # round's first two, of 10 all.
    assert made["moved"] == pytest.approx([1.0, 3.0, 7.0], rel=1e-5), "less the first"


def test_a_new_server_strategy_is_one_file_and_one_row(copy):
    """It runs in virtual time, on one server and on two, as any other."""
    copy.add("strategies/parameter_server/every_second.py", EVERY_SECOND, "EverySecond")
    made = copy(
        """
import json
import torch
import mpitrain as mt
from mpitrain.values import parse
from mpitrain.virtual import Constant, Ideal
data = mt.Synthetic(24, x=((1,), "float32"), y=((1,), "float32"))
def run(text, name):
    job = mt.Job(
        model=lambda: torch.nn.Linear(1, 1), loss=lambda model, batch: ((model(batch["x"]) - batch["y"]) ** 2).mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1), data=data, batch_size=2, epochs=2,
    )
    result = mt.simulate(job, parse(text, "strategy"), 3, Constant(), Ideal(), run_dir=name, quiet=True)
    return [[one[key] for key in ("version", "accepted", "dropped", "samples_dropped")] for one in result["shards"]]
print(json.dumps({
    "public": "EverySecond" in mt.__all__,
    "one": run("every_second()", "one"),
    "two": run("every_second(first=1, servers=2, damping=inverse())", "two"),
}))
"""
    )
    assert made["public"]
    assert made["one"] == [[12, 12, 12, 24]], "24 pushes of 2 samples"
    assert made["two"] == [[12, 12, 12, 24]] * 2


def test_a_new_codec_is_one_file_and_one_row(copy):
    """It is encoded, decoded by its kind, listed in help, and trains in virtual time on both wires of a server."""
    copy.add("codecs/signs.py", SIGNS, "Signs")
    made = copy(
        """
import contextlib, io, json, sys
import mpitrain as mt
from mpitrain.cli.main import main
from mpitrain.strategies import registry
from mpitrain.values import parse
said = io.StringIO()
with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
    main(["train", "--help"])
light = [name for name in ("torch", "numpy") if name in sys.modules]
import torch
from mpitrain.codecs import add_message, message_statistics, whole
from mpitrain.model.wire.codec_registry import make_encoder
from mpitrain.virtual import Constant, Ideal
codec = parse("signs(dense_below=0)", "codec")
encoder = make_encoder(codec)
numbers = torch.tensor([1.0, -2.0, 3.0, -6.0])
message, sums = encoder.encode(whole(numbers)), torch.ones(4)
add_message(message, whole(sums), 2.0)
data = mt.Synthetic(64, x=((8,), "float32"), y=((1,), "float32"))
def loss(model, batch):
    return ((model(batch["x"]) - batch["x"].sum(1, keepdim=True)) ** 2).mean()
def model():
    torch.manual_seed(0)
    return torch.nn.Linear(8, 1)
def run(text, name):
    job = mt.Job(
        model=model, loss=loss, data=data, batch_size=8, epochs=10,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    )
    result = mt.simulate(job, parse(text, "strategy"), 2, Constant(), Ideal(), run_dir=name, quiet=True)
    trained = model()
    from safetensors.torch import load_file
    trained.load_state_dict(load_file(name + "/model.safetensors"))
    batch = {"x": torch.randn(64, 8, generator=torch.Generator().manual_seed(1))}
    return float(loss(trained, batch)) / float(loss(model(), batch))
print(json.dumps({
    "public": mt.Signs().name, "light": light, "help": "  signs()" in said.getvalue(),
    "row": registry.rows("codec")[0],
    "bytes": message.numel(), "statistics": message_statistics(message),
    "decoded": sums.tolist(), "kept": encoder.memory.state()["residual/flat"].tolist(),
    "push": run("async(push_wire=signs(dense_below=0))", "push"),
    "both": run("async(servers=2,push_wire=signs(dense_below=0),reply_wire=signs(dense_below=0))", "both"),
}))
""",
        warm=False,
    )
    assert made["public"] == "signs" and made["help"] and made["light"] == []
    assert made["row"][:4] == ["codec", "signs", "Signs", "signs()"]
    assert made["bytes"] == 32 + 4 + 1, "header, one mean, four signs"
    assert made["statistics"] == {"density": 1.0, "bytes": 37.0}
    assert made["decoded"] == [7.0, -5.0, 7.0, -5.0], "1 + 2 * (+-3)"
    assert made["kept"] == [-2.0, 1.0, 0.0, -3.0]
    assert made["push"] < 0.2 and made["both"] < 0.2


def test_two_codecs_cannot_share_a_kind_of_message(copy):
    copy.add("codecs/signs.py", SIGNS.replace("SIGNS = 11", "SIGNS = 7"), "Signs")
    said = copy(
        """
import json
from mpitrain.codecs.decode import decoders
try:
    said = decoders() and ""
except AssertionError as error:
    said = str(error)
print(json.dumps(said))
"""
    )
    assert said == "signs and onebit both have messages of kind 7"


def test_the_kinds_of_messages_keep_their_numbers():
    """Checkpoints hold messages and residuals of these; a number is never given to another codec."""
    kinds = {cls.name: sorted(cls.decoders) for cls in registered("codec")}
    assert kinds == {
        "none": [], "float16": [2], "bfloat16": [3], "eightbit": [4], "threshold": [5], "topk": [6, 10], "onebit": [7],
        "powersgd": [8], "qsgd": [9],
    }  # fmt: skip
