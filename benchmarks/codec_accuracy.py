"""Which codecs reach the accuracy of dense training after equally many samples?

    python benchmarks/codec_accuracy.py [--seeds 5] [--task digits teacher] [--codecs "threshold(density=0.01)" ...]

No MPI, a process for each seed: four workers' gradients are computed one after another, encoded by four encoders and
added in rank order, which is what the DDP hook does (`tests/mpi/programs/codec_cases.py` holds it to that). SGD at a
rate per task, the same for all codecs; two tasks:

    digits    scikit-learn's digits, 360 held out; an MLP of 85 thousand parameters
    teacher   20,000 samples of 64 numbers labelled by a random network, 4,000 held out; the same MLP

Seeds draw the model and the order of the samples. Accuracies are pooled over seeds; the difference to dense
training comes with a 95 % bootstrap interval over seeds. Results do not depend on the machine's load.
"""

from __future__ import annotations

import os
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch
from measuring.common import machine, make_parser, mean_interval, table, write_row
from measuring.measurement import CODECS, Command, Measurement
from torch import nn

from mpitrain.codecs import Part, add_message
from mpitrain.model.wire.codec_registry import check_optimizer, make_encoder, make_layout_of
from mpitrain.values import parse

MEASUREMENT = Measurement(
    contestants=("dense training",),
    depends=CODECS,
    keys=("task",),
    figures=("mean codecs.*.accuracies",),
    commands=(Command("python benchmarks/codec_accuracy.py --rounds 3", minutes=5),),
)

NUM_WORKERS, BATCH = 4, 16
CODECS = [
    "none", "bfloat16", "eightbit", "qsgd", "onebit", "powersgd", "topk(density=0.01)", "topk(density=0.001)",
    "threshold(density=0.01)", "threshold(density=0.001)",
]  # fmt: skip


def digits():
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    x, y = torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x[order], y[order]
    return (x[360:], y[360:]), (x[:360], y[:360]), (64, 256, 256, 10), 0.1, 20


def teacher():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(24_000, 64, generator=generator)
    first, second = torch.randn(64, 32, generator=generator), torch.randn(32, 10, generator=generator)
    y = (torch.relu(x @ first) @ second).argmax(1)
    return (x[4000:], y[4000:]), (x[:4000], y[:4000]), (64, 256, 256, 10), 0.1, 6


TASKS = {"digits": digits, "teacher": teacher}


def net(widths):
    layers = []
    for n, m in zip(widths, widths[1:], strict=False):
        layers += [nn.Linear(n, m), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def train(task, text, seed):
    """(accuracy on the held-out part, mean bytes of a message)."""
    (x, y), (held_x, held_y), widths, rate, epochs = TASKS[task]()
    torch.manual_seed(seed)
    module = net(widths)
    parameters = list(module.parameters())
    optimizer = torch.optim.SGD(parameters, lr=rate, momentum=0.0)
    codec = parse(text, "codec")
    check_optimizer(codec, optimizer)
    layout = make_layout_of((name, p.shape) for name, p in module.named_parameters())
    numel = sum(p.numel() for p in parameters)
    none = text == "none"
    encoders = [None if none else make_encoder(codec, NUM_WORKERS, w, seed) for w in range(NUM_WORKERS)]
    total = torch.zeros(numel)
    for p, view in zip(parameters, total.split([p.numel() for p in parameters]), strict=True):
        p.grad = view.view_as(p)
    num_bytes = num_messages = 0
    for epoch in range(epochs):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1000 * seed + epoch))
        for batch in order.split(NUM_WORKERS * BATCH):
            if len(batch) < NUM_WORKERS * BATCH:
                continue
            messages = []
            for encoder, share in zip(encoders, batch.split(BATCH), strict=True):
                loss = nn.functional.cross_entropy(module(x[share]), y[share])
                flat = torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, parameters)])
                messages.append(flat if encoder is None else encoder.encode([Part(flat, layout)]))
                num_bytes += messages[-1].numel() * messages[-1].element_size()
                num_messages += 1
            total.zero_()
            for message in messages:
                if none:
                    total.add_(message, alpha=1 / NUM_WORKERS)
                else:
                    add_message(message, [Part(total, layout)], 1 / NUM_WORKERS)
            optimizer.step()
    with torch.no_grad():
        accuracy = float((module(held_x).argmax(1) == held_y).float().mean())
    return accuracy, num_bytes / num_messages, 4 * numel


def study(task, codecs, num_seeds, pool):
    """Every codec, all seeds at a time; prints the table and writes a row."""
    rows = [("codec", "accuracy", "points from dense", "95 %", "times fewer bytes")]
    record = {}
    for text in codecs:
        began_s = time.perf_counter()
        runs = list(pool.map(train, [task] * num_seeds, [text] * num_seeds, range(num_seeds)))
        accuracies = [run[0] for run in runs]
        record[text] = {"accuracies": accuracies, "message_bytes": statistics.mean(run[1] for run in runs)}
        points = [100 * (a - b) for a, b in zip(accuracies, record["none"]["accuracies"], strict=True)]
        low, high = mean_interval(points)
        ratio = runs[0][2] / record[text]["message_bytes"]
        rows.append(
            (text, f"{100 * statistics.mean(accuracies):.2f} %", f"{statistics.mean(points):+.2f}",
             f"{low:+.2f} .. {high:+.2f}", f"{ratio:.1f}")
        )  # fmt: skip
        print(f"{task}: {rows[-1]} in {time.perf_counter() - began_s:.0f} s", flush=True)
    print(f"\n{task}\n{table(rows)}", flush=True)
    row = {"task": task, "workers": NUM_WORKERS, "seeds": num_seeds, "codecs": record}
    write_row("codec_accuracy", row)


def main():
    parser = make_parser(__doc__, MEASUREMENT)
    parser.add_argument("--rounds", "--seeds", dest="seeds", type=int, default=5)
    parser.add_argument("--task", nargs="+", choices=sorted(TASKS), default=sorted(TASKS))
    parser.add_argument("--codecs", nargs="+", default=CODECS)
    options = parser.parse_args()
    codecs = ["none", *(text for text in options.codecs if text != "none")]
    print(f"{machine()['cpu']}; {NUM_WORKERS} workers of {BATCH} samples, {options.seeds} seeds")
    with ProcessPoolExecutor(
        os.cpu_count(), get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,)
    ) as pool:
        for task in options.task:
            study(task, codecs, options.seeds, pool)


if __name__ == "__main__":
    main()
